"""Spans: work on one sample, with worker and times.

Ids are derived from run, sample and work, so repeated work is the same span. A `traceparent` header carries them.
"""

from __future__ import annotations

import hashlib
import json
import json.encoder
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

TRACEPARENT = "traceparent"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")

Attribute = str | int | float | bool


@dataclass(slots=True, kw_only=True)
class Span:
    """Work on one sample. Times are Unix seconds.

    `sent`: time when the record was published, to wait until `began`. `again`: the result existed already. `delivery`:
    number of the prompt's delivery; `stay`: number of the generator within it. `is_open`: the work went on after
    `ended`.
    """

    run: str  # uid
    sample: str
    name: str  # prompt, generation, move, a scoring stage, training, evaluation
    stage: str
    worker: int
    step: int
    began: float
    ended: float
    sent: float | None = None
    parent: str = ""  # id of the parent span, from a header; empty: this is the first
    again: bool = False
    delivery: int = 1
    stay: int = 1
    is_open: bool = False
    attributes: Mapping[str, Attribute] = field(default_factory=dict)

    @property
    def trace(self) -> str:
        return trace_id(self.run, self.sample)

    @property
    def what(self) -> str:
        if self.name == "move":
            return f"move {self.attributes.get('move')}"
        return what_was_done(self.name, self.delivery, self.stay)

    @property
    def id(self) -> str:
        return span_id(self.trace, self.what)

    @property
    def waited_seconds(self) -> float:
        return max(self.began - self.sent, 0.0) if self.sent is not None else 0.0

    @property
    def seconds(self) -> float:
        return max(self.ended - self.began, 0.0)

    def to_line(self) -> str:
        """Return a JSON line without default values, by hand for speed."""
        more = f',"sent":{self.sent:.6f}' if self.sent is not None else ""
        more += f',"parent":"{self.parent}"' if self.parent else ""
        more += ',"again":true' if self.again else ""
        more += f',"delivery":{self.delivery}' if self.delivery != 1 else ""
        more += f',"stay":{self.stay}' if self.stay != 1 else ""
        more += ',"is_open":true' if self.is_open else ""
        more += f',"attributes":{_encoded(self.attributes)}' if self.attributes else ""
        return (
            f'{{"run":{_quoted(self.run)},"sample":{_quoted(self.sample)},"name":"{self.name}","stage":"{self.stage}",'
            f'"worker":{self.worker},"step":{self.step},"began":{self.began:.6f},"ended":{self.ended:.6f}{more}}}\n'
        )

    @classmethod
    def from_line(cls, line: str) -> Span:
        try:
            span = cls(**json.loads(line))
            _ = span.seconds + span.waited_seconds + span.step + span.delivery + span.stay  # TypeError if not numbers
        except TypeError as error:
            raise ValueError(f"not a span: {error}") from error
        return span


_encoded = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would create an encoder for every line
_quoted = json.encoder.encode_basestring_ascii


def trace_id(uid: str, sample: str) -> str:
    return hashlib.blake2b(f"{uid}/{sample}".encode(), digest_size=16).hexdigest()


def span_id(trace: str, what: str) -> str:
    return hashlib.blake2b(f"{trace}/{what}".encode(), digest_size=8).hexdigest()


def what_was_done(name: str, delivery: int, stay: int) -> str:
    """Return the name of the work, with delivery and stay unless both are 1.

    >>> what_was_done("generation", 1, 1), what_was_done("generation", 1, 2)
    ('generation', 'generation 1.2')
    """
    return name if delivery == stay == 1 else f"{name} {delivery}.{stay}"


def traceparent(trace: str, span: str) -> str:
    return f"00-{trace}-{span}-01"


def parse(header: str) -> tuple[str, str] | None:
    """Return (trace, span), or None for an invalid `traceparent`."""
    found = _TRACEPARENT.fullmatch(header)
    return (found[1], found[2]) if found else None

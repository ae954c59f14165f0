"""Spans: what was done for one sample, by whom, from when to when. Their ids are derived, like those of records.

A sample's trace is a function of run and sample, a span's id of its trace and what was done; so what is done twice
is the same span, and who reads a span knows where it belongs without asking anybody. On its way between processes the
context is a header as W3C has it (`traceparent`).

Example:
    >>> trace = trace_id("3f2a91c0", "sums/3/7/1")
    >>> parse(traceparent(trace, span_id(trace, "prompt"))) == (trace, span_id(trace, "prompt"))
    True
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
    """Times are Unix seconds. `sent`: when the record that it began with was published; it waited from then to `began`.

    `again`: what came of it was there already (it was done before, or by somebody else).
    """

    run: str  # its uid
    sample: str
    name: str  # prompt, generation, a scoring stage, training, evaluation
    stage: str
    worker: int
    step: int
    began: float
    ended: float
    sent: float | None = None
    parent: str = ""  # another span's id, as a header told it; empty: the first
    again: bool = False
    attributes: Mapping[str, Attribute] = field(default_factory=dict)

    @property
    def trace(self) -> str:
        return trace_id(self.run, self.sample)

    @property
    def id(self) -> str:
        return span_id(self.trace, self.name)

    @property
    def waited_seconds(self) -> float:
        return max(self.began - self.sent, 0.0) if self.sent is not None else 0.0

    @property
    def seconds(self) -> float:
        return max(self.ended - self.began, 0.0)

    def to_line(self) -> str:
        """By hand, for a run has many: a third of what the json module takes. What is as by default is left out."""
        more = f',"sent":{self.sent:.6f}' if self.sent is not None else ""
        more += f',"parent":"{self.parent}"' if self.parent else ""
        more += ',"again":true' if self.again else ""
        more += f',"attributes":{_encoded(self.attributes)}' if self.attributes else ""
        return (
            f'{{"run":{_quoted(self.run)},"sample":{_quoted(self.sample)},"name":"{self.name}","stage":"{self.stage}",'
            f'"worker":{self.worker},"step":{self.step},"began":{self.began:.6f},"ended":{self.ended:.6f}{more}}}\n'
        )

    @classmethod
    def from_line(cls, line: str) -> Span:
        """Raises ValueError for what is none."""
        try:
            span = cls(**json.loads(line))
            _ = span.seconds + span.waited_seconds + span.step  # they are numbers
        except TypeError as error:
            raise ValueError(f"no span: {error}") from error
        return span


_encoded = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make one for every line
_quoted = json.encoder.encode_basestring_ascii


def trace_id(uid: str, sample: str) -> str:
    return hashlib.blake2b(f"{uid}/{sample}".encode(), digest_size=16).hexdigest()


def span_id(trace: str, name: str) -> str:
    return hashlib.blake2b(f"{trace}/{name}".encode(), digest_size=8).hexdigest()


def traceparent(trace: str, span: str) -> str:
    return f"00-{trace}-{span}-01"


def parse(header: str) -> tuple[str, str] | None:
    """Trace and span; None for what is no `traceparent`."""
    found = _TRACEPARENT.fullmatch(header)
    return (found[1], found[2]) if found else None

"""Mapping of subjects to JetStream streams, which store the declarations.

- Work: an interest stream with a durable consumer per name.
- State: the latest message per key (the subject's last word), republished under `latest.` with its number for watchers.
- Signal: a plain subject, whose stream only records the declaration.

>>> key_word("policy"), key_word("sums/3.7"), key_word("")
('policy', 'sums%2F3%2E7', '%')
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast
from urllib.parse import quote

from rlhfspec.errors import InvalidRequest
from rlhfspec.messages.transport.base import Consumer, Kind

SECOND = 1_000_000_000  # nanoseconds, as in JetStream
DUPLICATE_WINDOW_SECONDS = 3600  # ids stay known after their messages are gone; about 200 bytes each
_SUBJECT_WORDS = re.compile(r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*")
_KIND, _CONSUMERS = "rlhfspec.kind", "rlhfspec.consumers"


@dataclass(frozen=True, slots=True)
class Declared:
    kind: Kind
    consumers: Mapping[str, Consumer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Seconds for which work and state are kept (0: for ever), and extra stream metadata."""

    work_seconds: float = 0.0
    state_seconds: float = 0.0
    metadata: Mapping[str, str] = field(default_factory=dict)


FOR_EVER = Keeping()


def stream_name(subject: str) -> str:
    if not _SUBJECT_WORDS.fullmatch(subject):
        raise InvalidRequest("subject", subject, "must be words of letters, digits and -, with dots between them")
    return subject.replace(".", "_")


def key_word(key: str) -> str:
    return quote(key, safe="").replace(".", "%2E") or "%"


def latest_of(subject: str, word: str = "*") -> str:
    """Return the subject on which the server republishes state of the key `word`."""
    return f"latest.{subject}.{word}"


def stream_config(subject: str, declared: Declared, max_pending: int, keeping: Keeping = FOR_EVER) -> dict[str, Any]:
    consumers = [asdict(consumer) for consumer in declared.consumers.values()]
    seconds = keeping.work_seconds if declared.kind == "work" else keeping.state_seconds
    return {
        "name": stream_name(subject),
        "storage": "file",
        "num_replicas": 1,
        "max_msgs": max_pending,
        "max_age": round(seconds * SECOND),
        "duplicate_window": DUPLICATE_WINDOW_SECONDS * SECOND,
        "metadata": {**keeping.metadata, _KIND: declared.kind, _CONSUMERS: json.dumps(consumers)},
        **_settings(subject, declared.kind),
    }


def _settings(subject: str, kind: Kind) -> dict[str, Any]:
    if kind == "work":
        return {"subjects": [subject], "retention": "interest", "discard": "new"}
    settings: dict[str, Any] = {"retention": "limits", "discard": "old", "max_msgs_per_subject": 1}
    if kind == "signal":
        return {**settings, "subjects": [f"signal.{subject}"]}
    republish = {"src": f"{subject}.*", "dest": latest_of(subject, "{{wildcard(1)}}")}
    return {**settings, "subjects": [f"{subject}.*"], "republish": republish}


def consumer_config(consumer: Consumer) -> dict[str, Any]:
    """Return a consumer's settings, without a delivery limit because the puller writes dead letters."""
    return {
        "name": consumer.name,
        "durable_name": consumer.name,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": round(consumer.ack_wait_seconds * SECOND),
        "max_ack_pending": consumer.max_unacknowledged,
        "max_deliver": -1,
    }


def requests_for(
    subject: str, declared: Declared, max_pending: int, keeping: Keeping = FOR_EVER
) -> list[tuple[str, dict[str, Any]]]:
    """Return the idempotent JetStream calls (name, body) that declare a subject's stream, then its consumers."""
    stream = stream_name(subject)
    of_consumers = [
        (f"CONSUMER.CREATE.{stream}.{each.name}", {"stream_name": stream, "config": consumer_config(each)})
        for each in declared.consumers.values()
    ]
    return [(f"STREAM.CREATE.{stream}", stream_config(subject, declared, max_pending, keeping)), *of_consumers]


def declared_of(subject: str, info: Mapping[str, Any]) -> Declared:
    metadata = info["config"].get("metadata", {})
    if _KIND not in metadata:
        raise InvalidRequest("subject", subject, f"the stream {stream_name(subject)} was made by another program")
    consumers = [Consumer(**fields) for fields in json.loads(metadata[_CONSUMERS])]
    return Declared(cast(Kind, metadata[_KIND]), {consumer.name: consumer for consumer in consumers})

"""Dead letters of messages that a consumer could not handle."""

from __future__ import annotations

from dataclasses import dataclass, fields

from google.protobuf.message import DecodeError

from rlhfspec.errors import MalformedRecord
from rlhfspec.messages.transport import dead_letters_pb2 as letters


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    subject: str  # of the message
    id: str
    consumer: str  # that could not handle it
    num_deliveries: int
    reason: str
    data: bytes

    @property
    def letter_id(self) -> str:
        return f"{self.subject.rpartition('.')[2]}/{self.consumer}/{self.id}"


def dead_letter_subject(subject: str) -> str:
    """Return the dead-letter subject of a work subject, equal to `messages.loop.dead_letters`."""
    return f"{subject.rpartition('.')[0]}.dead"


def encode(letter: DeadLetter) -> bytes:
    message = letters.DeadLetter(num_deliveries=letter.num_deliveries, data=letter.data)
    for name in ("subject", "id", "consumer", "reason"):
        setattr(message, name, _text(getattr(letter, name)))
    return message.SerializeToString()


def decode(data: bytes) -> DeadLetter:
    """Decode a letter, or raise MalformedRecord."""
    try:
        message = letters.DeadLetter.FromString(data)
    except DecodeError as error:
        raise MalformedRecord(f"not a dead letter: {error}") from error
    if not (message.subject and message.consumer):
        raise MalformedRecord("not a dead letter: subject and consumer must be set")
    return DeadLetter(**{field.name: getattr(message, field.name) for field in fields(DeadLetter)})


def _text(value: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return value.encode(errors="replace").decode()

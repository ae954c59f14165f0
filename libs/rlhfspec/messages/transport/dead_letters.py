"""What nobody could handle: the message, whose it was, and why. It travels on the dead-letter subject as JSON.

Example:
    >>> letter = DeadLetter(
    ...     subject="rlhf.sums.sample", id="sums/3/7/1", consumer="reward", num_deliveries=5, reason="no ack", data=b"!"
    ... )
    >>> decode(encode(letter)) == letter, dead_letter_subject(letter.subject), letter.letter_id
    (True, 'rlhf.sums.dead', 'sample/reward/sums/3/7/1')
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass, replace

from rlhfspec.errors import MalformedRecord

_TYPES = {"subject": str, "id": str, "consumer": str, "num_deliveries": int, "reason": str, "data": str}  # in JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    subject: str  # where it travelled
    id: str
    consumer: str  # whose it was
    num_deliveries: int
    reason: str
    data: bytes

    @property
    def letter_id(self) -> str:
        """One letter a message and consumer, however often it is reported."""
        return f"{self.subject.rpartition('.')[2]}/{self.consumer}/{self.id}"


def dead_letter_subject(subject: str) -> str:
    """Beside the subject: the last word becomes `dead` (as `rlhfspec.messages.loop.dead_letters` has it)."""
    return f"{subject.rpartition('.')[0]}.dead"


def encode(letter: DeadLetter) -> bytes:
    return json.dumps(asdict(letter) | {"data": base64.b64encode(letter.data).decode()}).encode()


def decode(data: bytes) -> DeadLetter:
    """Raises `MalformedRecord` for anything that `encode` did not make: every stage may write letters."""
    try:
        fields = json.loads(data)
        if {name: type(value) for name, value in fields.items()} != _TYPES:
            raise ValueError(f"must hold {', '.join(_TYPES)}")
        return DeadLetter(**fields | {"data": base64.b64decode(fields["data"], validate=True)})
    except (ValueError, AttributeError, RecursionError) as error:
        raise MalformedRecord(f"no dead letter: {error}") from error


def without_data(letter: DeadLetter, why: str) -> DeadLetter:
    """For data that no letter has room for."""
    return replace(letter, data=b"", reason=f"{letter.reason} ({why})")

"""Messages of `/rlhfspec.Weights/Get`: request, status, then header and buffer pieces."""

from __future__ import annotations

from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlhfspec.errors import MalformedRecord
from rlhfspec.messages.records import Role

SERVICE, METHOD = "rlhfspec.Weights", "Get"
PIECE_BYTES = 1 << 20  # well under the 4 MB that gRPC takes by default
MAX_MESSAGE_BYTES = 1 << 16


class WeightsMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class WeightsRequest(WeightsMessage):
    job: str = Field(max_length=253)
    role: Role
    version: int = Field(ge=0)


class WeightsAnswer(WeightsMessage):
    """Status before the weight bytes. `missing`: the newest version here is `have`. `busy`: too many open streams."""

    kind: Literal["weights", "missing", "busy"]
    have: int = 0


_M = TypeVar("_M", bound=WeightsMessage)


def parse(kind: type[_M], content: bytes, most: int = MAX_MESSAGE_BYTES) -> _M:
    """Parse a message, or raise MalformedRecord."""
    if len(content) > most:
        raise MalformedRecord(f"{len(content)} bytes, more than {most}")
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise MalformedRecord(": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))) from None

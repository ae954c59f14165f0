"""What a receiver of weights asks, and what it is answered before the bytes.

One call, `/rlhfspec.Weights/Get`: the request; an answer; and, when the answer is `weights`, the header (packed.py) and
then pieces of the buffer, from `offset` on. An empty message anywhere says only: I live, and wait for more myself.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rlhfspec.errors import MalformedRecord
from rlhfspec.messages.records import Role

SERVICE, METHOD = "rlhfspec.Weights", "Get"
PIECE_BYTES = 1 << 20  # well under the 4 MB that gRPC takes without being asked to
MAX_MESSAGE_BYTES = 1 << 16
MAX_LOST = 100  # addresses in a request
HOST_AND_PORT = re.compile(r"(?:[A-Za-z0-9]([A-Za-z0-9.-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")


def _host_and_port(address: str) -> str:
    if address and not HOST_AND_PORT.fullmatch(address):
        raise ValueError("is no host:port")
    return address


Address = Annotated[str, AfterValidator(_host_and_port)]


class WeightsMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class WeightsRequest(WeightsMessage):
    job: str = Field(max_length=253)
    role: Role
    version: int = Field(ge=0)
    offset: int = Field(default=0, ge=0)
    address: Address = ""  # where the receiver itself serves; empty: nowhere
    lost: list[Address] = Field(default=[], max_length=MAX_LOST)  # who could not give it
    direct: bool = False  # do not send me to others
    only_whole: bool = False  # do not let me wait for what you wait for


class WeightsAnswer(WeightsMessage):
    """`ask`: take it from `peer`. `missing`: the newest here is `have`. `busy`: feeding as many as it may."""

    kind: Literal["weights", "ask", "missing", "busy"]
    peer: Address = ""
    have: int = 0


_M = TypeVar("_M", bound=WeightsMessage)


def parse(kind: type[_M], content: bytes, most: int = MAX_MESSAGE_BYTES) -> _M:
    """
    >>> parse(WeightsAnswer, b'{"kind": "ask", "peer": "unix:/tmp/x"}')
    Traceback (most recent call last):
        ...
    rlhfspec.errors.MalformedRecord: malformed record: peer: Value error, is no host:port
    """
    if len(content) > most:
        raise MalformedRecord(f"{len(content)} bytes, more than {most}")
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise MalformedRecord(": ".join((*map(str, first["loc"]), first["msg"]))) from None

"""Messages of weight groups, in which generators poll for orders and report results."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rlhfspec.messages.records import Role
from rlhfspec.training.weights.grpc_messages import WeightsMessage

GROUP_SERVICE, GROUP_METHOD = "rlhfspec.WeightsGroup", "GroupAsk"
MAX_BYTES = 3 << 20  # of names and shapes; gRPC takes 4 MB
MAX_ORDER_BYTES = 4 << 20
MAX_MEMBERS = 1024
_HOST_AND_PORT = re.compile(r"(?:[A-Za-z0-9]([A-Za-z0-9.-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")


def _host_and_port(address: str) -> str:
    if not _HOST_AND_PORT.fullmatch(address):
        raise ValueError("must be host:port")
    return address


Address = Annotated[str, AfterValidator(_host_and_port)]


class Wish(WeightsMessage):
    """Generator's request: `wants` the next version by group. `dtype`: type to send; empty: the trainer's."""

    wants: bool
    dtype: Literal["", "bfloat16", "float32"] = ""
    device: str = Field("cpu", max_length=20)  # type of the receiving device


class GroupSaid(WeightsMessage):
    order: str = Field(pattern="^[0-9a-f]{16}$")
    problem: str = Field("", max_length=1000)


class GroupAsk(WeightsMessage):
    """Poll of a generator. `member`: address of its process. `said`: result of its last order."""

    member: Address
    wish: Wish
    said: GroupSaid | None = None


class GroupBegin(WeightsMessage):
    """Order to receive a version. An unchanged `epoch` keeps the groups.

    `rank`: the receiver's rank in each trainer rank's group (sender: 0). `header`: the version's, in JSON.
    """

    job: str = Field(max_length=253)
    role: Role
    version: int = Field(ge=0)
    transfer: str = Field(pattern="^[0-9a-f]{16}$")  # id of this transfer
    epoch: str = Field(pattern="^[0-9a-f]{16}$")
    meeting: Address
    rank: int = Field(ge=1, le=MAX_MEMBERS)
    size: int = Field(ge=2, le=MAX_MEMBERS)
    num_senders: int = Field(ge=1, le=MAX_MEMBERS)
    bucket_bytes: int = Field(ge=64, le=256 << 20)
    backend: Literal["gloo", "nccl"]
    header: str


class GroupCommit(WeightsMessage):
    transfer: str = Field(pattern="^[0-9a-f]{16}$")
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    digests: list[list[str]]


class GroupOrder(WeightsMessage):
    """Reply to a poll, with at most one order, repeated until its result arrives."""

    order: str = Field("", pattern="^([0-9a-f]{16})?$")
    begin: GroupBegin | None = None
    commit: GroupCommit | None = None

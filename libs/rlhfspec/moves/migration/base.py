"""What a mover is given: its peers, how to reach them, and what keeps prompts in progress. Contracts, and the error of
both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rlhfspec.errors import RLHFSpecError
from rlhfspec.telemetry.base import SampleProgress

TELL_SECONDS = 6.0  # for a reply: the link's wait, and a step or two of the engine there


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another generator, as its `WorkerInfo` tells: `address` is its `moves_address`, `incarnation` its id."""

    name: str
    address: str
    incarnation: str


class NoReply(RLHFSpecError):
    """A question that was not answered in time: it may have been heard."""

    def __init__(self, address: str, problem: str) -> None:
        self.address = address
        self.problem = problem
        super().__init__(f"{address}: {problem}")


class MoveControl(Protocol):
    async def ask(self, peer: Peer, message: bytes, *, timeout: float = TELL_SECONDS) -> bytes:
        """The reply. Raises NoReply for whatever keeps it from coming."""
        ...


class Custody(Protocol):
    """The generator service: its prompts in progress, each with what it is acknowledged with. Called in the event loop.

    A sample that the engine runs has its prompt in custody, always: it is taken before the engine has it, and given
    after the engine let go of it.
    """

    def prompt_of(self, sample_id: str) -> tuple[bytes, str] | None:
        """Its record, as bytes of your own making, and its ack token; None: it is not here."""
        ...

    async def taken(self, sample_id: str, prompt: bytes, token: str) -> None:
        """Keep it in progress from now on. Raises MalformedRecord, or another RLHFSpecError, for what cannot be."""
        ...

    def arrived(self, sample_id: str, progress: SampleProgress) -> None:
        """What was taken goes on here, from there on."""
        ...

    def given(self, sample_id: str, progress: SampleProgress | None) -> None:
        """Another one keeps it in progress: forget it without ack or nak. None: it was taken and could not arrive."""
        ...

    def forgotten(self, sample_id: str, progress: SampleProgress) -> None:
        """It is nowhere here, and perhaps nowhere: forget it without a word; if need be it is delivered again."""
        ...

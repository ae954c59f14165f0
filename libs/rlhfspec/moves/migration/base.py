"""Contracts that a mover depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rlhfspec.errors import RLHFSpecError
from rlhfspec.telemetry.base import SampleProgress

TELL_SECONDS = 6.0  # for a reply: the link's timeout plus one or two engine steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another generator, from its `WorkerInfo`."""

    name: str
    address: str
    incarnation: str


class NoReply(RLHFSpecError):
    """Raised when a question was not answered in time. The peer may still have received it."""

    def __init__(self, address: str, problem: str) -> None:
        self.address = address
        self.problem = problem
        super().__init__(f"{address}: {problem}")


class MoveControl(Protocol):
    async def ask(self, peer: Peer, message: bytes, *, timeout: float = TELL_SECONDS) -> bytes:
        """Return the peer's reply. Raises NoReply on any failure."""
        ...


class Custody(Protocol):
    """Prompts in progress of the generator service, with ack tokens. Call it in the event loop. The prompt of every
    sample in the engine is in custody, from before its import until after its release."""

    def prompt_of(self, sample_id: str) -> tuple[bytes, str] | None:
        """Return the prompt's record as bytes and its ack token, or None if it is not here."""
        ...

    async def taken(self, sample_id: str, prompt: bytes, token: str) -> None: ...

    def arrived(self, sample_id: str, progress: SampleProgress) -> None: ...

    def given(self, sample_id: str, progress: SampleProgress | None) -> None:
        """Forget a prompt that another process keeps, without ack or nak. `progress` is None if the import failed."""
        ...

    def forgotten(self, sample_id: str, progress: SampleProgress) -> None:
        """Forget a prompt that may run nowhere, without ack or nak."""
        ...

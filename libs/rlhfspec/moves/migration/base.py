"""Protocols of a mover's peers and of its prompt storage."""

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
    """Raised when a peer does not reply in time; it may still have received the message."""

    def __init__(self, address: str, problem: str) -> None:
        self.address = address
        self.problem = problem
        super().__init__(f"{address}: {problem}")


class MoveControl(Protocol):
    async def ask(self, peer: Peer, message: bytes, *, timeout: float = TELL_SECONDS) -> bytes:
        """Send a message and return the peer's reply; raise NoReply on any failure."""
        ...


class Custody(Protocol):
    """Storage of prompts with ack tokens, from before import until after release; used only in the event loop."""

    def prompt_of(self, sample_id: str) -> tuple[bytes, str] | None:
        """Return a sample's encoded prompt and ack token, or None if not kept here."""
        ...

    async def taken(self, sample_id: str, prompt: bytes, token: str) -> None: ...

    def arrived(self, sample_id: str, progress: SampleProgress) -> None: ...

    def given(self, sample_id: str, progress: SampleProgress | None) -> None:
        """Drop a prompt that another process keeps, without ack or nak; `progress` is None after a failed import."""
        ...

    def forgotten(self, sample_id: str, progress: SampleProgress) -> None:
        """Drop a prompt that perhaps runs nowhere, without ack or nak."""
        ...

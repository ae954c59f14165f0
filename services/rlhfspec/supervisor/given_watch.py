"""Looks whether a NATS that the user gave is still there: everybody waits for it, and a run must not wait for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rlhfspec.errors import ServerFailed
from rlhfspec.messages.transport.clock import Clock
from rlhfspec.messages.transport.nats import NatsTransport

_AWAY_SECONDS = 180.0  # less than a run may wait for itself, so that the line names the server
_ANSWER_SECONDS = 5.0
_LOOK_SECONDS = 1.0


class GivenNatsWatch:
    """`subject`: one of the run's; `say` is told when the server goes, and when it is back."""

    def __init__(
        self, transport: NatsTransport, url: str, subject: str, clock: Clock, say: Callable[[str], None]
    ) -> None:
        self._transport = transport
        self._url = url
        self._subject = subject
        self._clock = clock
        self._say = say

    async def run(self) -> None:
        """Raises ServerFailed when it stays away."""
        heard, is_away = self._clock.now(), False
        while True:
            if await self._transport.answers(self._subject, _ANSWER_SECONDS):
                if is_away:
                    self._say(f"{self._url}: is back")
                heard, is_away = self._clock.now(), False
            elif not is_away:
                is_away = True
                self._say(f"{self._url}: does not answer; everybody waits for it, {_AWAY_SECONDS:g} s at most")
            elif self._clock.now() - heard > _AWAY_SECONDS:
                raise ServerFailed("--nats", f"{self._url}: no answer for {_AWAY_SECONDS:g} s")
            await asyncio.sleep(_LOOK_SECONDS)

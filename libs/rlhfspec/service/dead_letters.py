"""Ends the run when nobody could handle a record: without it a step would wait for ever."""

from __future__ import annotations

from rlhfspec.errors import RecordUndeliverable
from rlhfspec.service.base import Service
from rlhfspec.service.bus import Bus
from rlhfspec.service.vitals import Vitals
from rlhfspec.transport.dead_letters import DeadLetter, decode

LOOK_EVERY_SECONDS = 1.0


class DeadLetterWatch(Service):
    """Give it to the supervisor beside the stages.

    consumes: the dead letters of the job; produces: nothing; waits for: a record that a stage refused for good, could
    not decode, or never acknowledged; unblocked by: any stage. It raises `RecordUndeliverable` with the first.
    """

    def __init__(self, bus: Bus, vitals: Vitals) -> None:
        super().__init__("supervisor", 0, vitals)
        self._bus = bus

    async def run(self) -> None:
        letters = await self._bus.dead_letters()
        while not self.stopping.is_set():
            with self.vitals.waiting("records that nobody could handle"):
                messages = await self.unless_stopped(letters.pull(1, LOOK_EVERY_SECONDS))
            for message in messages:
                raise _undeliverable(decode(message.data))


def _undeliverable(letter: DeadLetter) -> RecordUndeliverable:
    return RecordUndeliverable(letter.consumer, letter.subject, letter.id, letter.reason)

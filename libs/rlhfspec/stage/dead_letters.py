"""Watch that ends the run at an undeliverable record."""

from __future__ import annotations

import logging
from typing import get_args

from rlhfspec.errors import MalformedRecord, RecordUndeliverable
from rlhfspec.messages.records import Record
from rlhfspec.messages.transport.base import Message
from rlhfspec.messages.transport.dead_letters import DeadLetter, decode
from rlhfspec.stage.base import Service
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.vitals import Vitals

LOOK_EVERY_SECONDS = 1.0
MALFORMED = str(MalformedRecord(""))
log = logging.getLogger("rlhfspec.stage")


class DeadLetterWatch(Service):
    """Service that raises RecordUndeliverable at this run's first dead letter (undeliverable record).

    consumes: dead letters; produces: nothing; waits for: an unhandled record; unblocked by: any stage.
    """

    def __init__(self, bus: Bus, vitals: Vitals) -> None:
        super().__init__("supervisor", 0, vitals)
        self._bus = bus

    async def run(self) -> None:
        letters = await self._bus.dead_letters()
        while not self.stopping.is_set():
            with self.vitals.waiting("records that no worker could handle"):
                messages = await self.unless_stopped(letters.pull(1, LOOK_EVERY_SECONDS))
            for message in messages:
                if (problem := undeliverable(self._bus, message)) is not None:
                    raise problem


def undeliverable(bus: Bus, message: Message) -> RecordUndeliverable | None:
    """Return the error for a dead letter, or None if it is no record of this run."""
    try:
        letter = decode(message.data)
        if letter.data or letter.reason.startswith(MALFORMED):  # else the record was too large for a letter
            _read(bus, letter)
    except MalformedRecord as error:
        log.warning("ignoring a dead letter that is not a record of this run: %s", error)
        return None
    return RecordUndeliverable(letter.consumer, letter.subject, letter.id, letter.reason)


def _read(bus: Bus, letter: DeadLetter) -> Record:
    for record_type in get_args(Record):
        if bus.subject(record_type) == letter.subject:
            record: Record = bus.read(record_type, letter.id, letter.data)
            return record
    raise MalformedRecord(f"{letter.id} is of {letter.subject!r}, which is not a subject of this run")

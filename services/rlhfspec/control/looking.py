"""Services that listen to a run's workers and check the broker."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from rich.console import Console

from rlhfspec.control.knowledge import RunKnowledge
from rlhfspec.errors import InvalidRequest, MalformedRecord, StorageError
from rlhfspec.job import RLHFJob
from rlhfspec.messages.records import DatasetInfo, Heartbeat, StepReport, WorkerInfo
from rlhfspec.messages.records.metrics import StepMetrics
from rlhfspec.messages.transport.base import Subscription
from rlhfspec.messages.transport.nats import NatsTransport
from rlhfspec.messages.wire.codec import decode
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.runs.view.view import View
from rlhfspec.stage.base import Service
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.dead_letters import undeliverable
from rlhfspec.stage.vitals import Vitals

_OBSERVE_SECONDS = 0.1
FOLDER_SECONDS, STORE_SECONDS = (1.0, 5.0)  # between two listings of checkpoints, which cost money in an object store
FOLDER_DEADLINE_SECONDS = 600.0  # hanging storage must not end the process
ASK_SECONDS, _ANSWER_SECONDS = 1.0, 2.0
_STEP_FOLDER = re.compile(r"step-(\d+)")
log = logging.getLogger("rlhfspec.stage")


class Looking(Service):
    """Observer of a run.

    consumes: Heartbeat, WorkerInfo, StepReport, DatasetInfo, dead letters; produces: nothing; waits for: a record;
    unblocked by: every stage.
    """

    def __init__(
        self,
        vitals: Vitals,
        bus: Bus,
        knowledge: RunKnowledge,
        last_checkpoint: Callable[[], int],
        *,
        folder_seconds: float = FOLDER_SECONDS,
    ) -> None:
        super().__init__("control", 0, vitals)
        self._folder_seconds = folder_seconds
        self._bus, self._knowledge, self._last_checkpoint = bus, knowledge, last_checkpoint
        self._folder_at = vitals.clock.now()
        self._clock = vitals.clock

    async def run(self) -> None:
        view, knowledge = self._bus.of("view"), self._knowledge
        heard: list[tuple[Any, Callable[[Any], None]]] = [
            (await view.subscribe(WorkerInfo), knowledge.ready),
            (await view.subscribe(Heartbeat), knowledge.heard),
            (await view.subscribe(StepReport), knowledge.stepped),
        ]
        letters = await self._bus.dead_letters()
        infos = await self._bus.transport.watch(self._bus.subject(DatasetInfo))
        while not self.stopping.is_set():
            for inbox, take in heard:
                for delivery in await inbox.pull(max_records=1024, timeout_seconds=0.0):
                    _take(take, delivery.record)
            await self._hear_letters(letters)
            await self._hear_infos(infos)
            await self._look_at_folder()
            await self.pause("records", _OBSERVE_SECONDS)

    async def _hear_letters(self, letters: Subscription) -> None:
        for message in await letters.pull(64, 0.0):
            if (problem := undeliverable(self._bus, message)) is not None:
                self._knowledge.could_not_be_handled(str(problem))

    async def _hear_infos(self, infos: Subscription) -> None:
        for message in await infos.pull(8, 0.0):
            try:
                info = decode(message.data)
            except MalformedRecord as error:
                log.warning("ignored a malformed dataset info: %s", error)
                continue
            if isinstance(info, DatasetInfo):
                self._knowledge.read(info)

    async def _look_at_folder(self) -> None:
        now = self._clock.now()
        every = FOLDER_SECONDS if self._knowledge.is_trained else self._folder_seconds  # viewers leave soon
        if now - self._folder_at >= every:
            self._folder_at = now
            with self.vitals.working("looking for checkpoints", deadline_seconds=FOLDER_DEADLINE_SECONDS):
                try:
                    self._knowledge.kept(await self.in_thread(self._last_checkpoint))
                except StorageError as error:
                    log.warning("the checkpoints cannot be listed: %s", error)


def _take(take: Callable[[Any], None], record: Any) -> None:
    try:
        take(record)
    except InvalidRequest as error:
        log.warning("ignored a record: %s", error)


def steps_of(folder: RunFolder) -> list[StepMetrics]:
    """Return the folder's steps, or none if it cannot be read."""
    try:
        return folder.steps()
    except (OSError, InvalidRequest, StorageError) as error:
        log.warning("%s cannot be read: %s", folder.steps_file, error)
        return []


def last_checkpoint(folder: RunFolder) -> int:
    """Return the step of the last complete checkpoint, or 0."""
    try:
        names = [entry.name for entry in folder.checkpoints.iterdir()]
    except OSError:
        return 0
    return max((int(found[1]) for name in names if (found := _STEP_FOLDER.fullmatch(name))), default=0)


def view_of(job: RLHFJob, console: Console, *, shown: bool) -> View:
    """Return a view of the job, on if `shown` and else off, whatever the job sets."""
    observability = job.spec.observability.model_copy(update={"view": "auto" if shown else "off"})
    spec = job.spec.model_copy(update={"observability": observability})
    return View(job.model_copy(update={"spec": spec}), console, on_interrupt="end this view; the job goes on")


class BrokerWatch(Service):
    """Pinger of the broker. consumes: nothing; produces: nothing; waits for: its next ping; unblocked by: time."""

    def __init__(self, vitals: Vitals, transport: NatsTransport, bus: Bus, knowledge: RunKnowledge) -> None:
        super().__init__("broker", 0, vitals)
        self._transport, self._subject, self._knowledge = transport, bus.subject(Heartbeat), knowledge

    async def run(self) -> None:
        was_away = False
        while not self.stopping.is_set():
            if await self._transport.answers(self._subject, _ANSWER_SECONDS):
                self._knowledge.broker_answered()
                if was_away:
                    log.info("the broker answers again")
                was_away = False
            elif not was_away:
                was_away = True
                log.warning("the broker does not answer")
            await self.pause("the next ping of the broker", ASK_SECONDS)

"""What this generator's drafter learns goes to the others, and into the run's folder; what theirs learn comes here.

Two rules, and no token depends on either: a drafter goes on from what was learnt from more tokens than its own; and it
hands out its own once that is from a quarter more tokens than anything announced, or from 32,768 more.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from pathlib import Path

from rlhfspec.engine.base import EngineProtocol, LearningReport, Learnt
from rlhfspec.errors import RLHFSpecError
from rlhfspec.messages.records import DraftWeights
from rlhfspec.runs.folder.learnt import LEARNT, LearntLine, append_learnt_line
from rlhfspec.stage.base import PULL_SECONDS, Service
from rlhfspec.stage.bus import StageBus
from rlhfspec.stage.threads import ComputeThread
from rlhfspec.training.checkpoint.learnt import read_learnt, write_learnt
from rlhfspec.training.weights import WeightStore

log = logging.getLogger("rlhfspec.stage")
_MORE, _MUCH_MORE = 1 / 4, 32768  # than anything announced: a share of it, or tokens
_STAGGERED = 8  # the n-th generator waits for n eighths more than the first, so that not all hand out at once
_REST = 50.0  # times as long as handing out took, until it may again
_MOST_BYTES = 1 << 30  # what is larger stays where it was learnt


class LearntSharing:
    """Of one generator; nothing where its engine's drafter does not learn. `news` wakes the generator up.

    run_folder: None, nothing is kept.
    """

    def __init__(
        self,
        generator: Service,
        bus: StageBus,
        engine: EngineProtocol,
        weights: WeightStore,
        run_folder: Path | None,
        news: asyncio.Event,
        job: str,
    ) -> None:
        self._generator = generator
        self._bus = bus
        self._engine = engine
        self._learner = engine.abilities.learning
        self._weights = weights
        self._folder = run_folder
        self._news = news
        self._job = job
        self._name = f"generator-{generator.worker}"
        self._start = secrets.token_hex(4)
        self._thread = ComputeThread(f"{self._name}-learnt")
        self._announced = 0  # the newest version that is known of
        self._arrived: Learnt | None = None
        self._handing_out: asyncio.Task[None] | None = None
        self._not_before = 0.0
        self._told = LearningReport()
        self._told_weights_version = engine.weights_version
        generator.leaving.callback(self._thread.close)

    async def follow(self) -> None:
        """Fetch what others hand out, beside what the engine does."""
        if self._learner is None:
            return
        async with await self._bus.subscribe(DraftWeights) as inbox:
            while not self._generator.stopping.is_set():
                pulling = inbox.pull(max_records=64, timeout_seconds=PULL_SECONDS)
                arrived = [delivery.record for delivery in await self._generator.unless_stopped(pulling)]
                newest = max(arrived, key=lambda record: record.version, default=None)
                if newest is not None and newest.version > max(self._announced, self._report.version):
                    self._announced = newest.version
                    await self._fetch(newest)

    async def restore(self) -> None:
        """Go on from what an earlier process of this run left."""
        if self._learner is None or self._folder is None:
            return
        try:
            found = await self._thread.in_thread(read_learnt, self._folder / LEARNT)
        except (RLHFSpecError, OSError) as error:
            log.warning("the drafter begins anew: %s", error)
            return
        if found is not None:
            self._arrived = Learnt(version=found[0], tensors=found[1])
            self._announced = found[0]

    async def between_steps(self) -> None:
        """Take what arrived, and hand out what is due."""
        if self._learner is None:
            return
        if self._arrived is not None:
            arrived, self._arrived = self._arrived, None
            try:
                if await self._generator.in_thread(self._learner.take, arrived):
                    log.info("the drafter goes on from what was learnt from %d tokens", arrived.version)
            except RLHFSpecError as error:
                log.warning("what a drafter learnt from %d tokens is not taken: %s", arrived.version, error)
        if self.is_due:
            learnt = await self._generator.in_thread(self._learner.learnt)
            self._handing_out = asyncio.create_task(self._hand_out(learnt))
        if self._told_weights_version != self._engine.weights_version:
            await self._tell()

    @property
    def is_due(self) -> bool:
        """It has learnt enough to hand that out, and is not handing out, nor has just done so."""
        if self._learner is None or time.monotonic() < self._not_before:
            return False
        stagger = 1 + min(self._generator.worker, _STAGGERED) / _STAGGERED
        more = self._report.version - self._announced
        is_idle = self._handing_out is None or self._handing_out.done()
        return is_idle and more > 0 and more >= stagger * min(_MORE * self._announced, _MUCH_MORE)

    async def leave(self) -> None:
        """Hand out the last of it."""
        if self._learner is None:
            return
        if self._handing_out is not None:
            await self._handing_out
        if self._report.version > self._announced:
            learnt = await self._generator.in_thread(self._learner.learnt)
            await self._hand_out(learnt)
        await self._tell()

    def cancel(self) -> None:
        if self._handing_out is not None:
            self._handing_out.cancel()

    @property
    def _report(self) -> LearningReport:
        return LearningReport() if self._learner is None else self._learner.report

    async def _fetch(self, record: DraftWeights) -> None:
        try:
            tensors = await self._thread.in_thread(self._weights.get, record.weights)
        except (RLHFSpecError, OSError) as error:
            log.warning("what a drafter learnt from %d tokens is not taken: %s", record.version, error)
        else:
            self._arrived = Learnt(version=record.version, tensors=tensors)
            self._news.set()

    async def _hand_out(self, learnt: Learnt) -> None:
        """First into the folder, then to others. Where that fails, the next one may succeed."""
        began = time.monotonic()
        self._announced = learnt.version
        num_bytes = sum(tensor.nbytes for tensor in learnt.tensors.values())
        if num_bytes > _MOST_BYTES:
            log.warning("what the drafter learns stays here: %d bytes, more than %d", num_bytes, _MOST_BYTES)
            self._not_before = float("inf")
            return
        try:
            record = await self._thread.in_thread(self._put, learnt)
            await self._bus.publish(record)
        except (RLHFSpecError, OSError) as error:
            log.warning("what the drafter learnt from %d tokens is not handed out: %s", learnt.version, error)
        now = time.monotonic()
        self._not_before = now + _REST * (now - began)

    def _put(self, learnt: Learnt) -> DraftWeights:
        if self._folder is not None:
            write_learnt(self._folder / LEARNT, learnt.version, learnt.tensors, by=self._name)
        put = self._weights.put(self._job, "drafter", learnt.version, learnt.tensors)
        id = f"{put.id}/{self._name}/{self._start}"
        return DraftWeights(id=id, job=self._job, version=put.version, uri=put.uri, digest=put.digest)

    async def _tell(self) -> None:
        """Write down what learning cost and brought under the last version of the policy's weights."""
        report, told = self._report, self._told
        version, self._told_weights_version = self._told_weights_version, self._engine.weights_version
        if self._folder is None or report == told:
            return
        self._told = report
        before = (*told.num_accepted, *[0] * len(report.num_accepted))
        line = LearntLine(
            generator=self._name,
            unix_seconds=time.time(),
            weights_version=version,
            version=report.version,
            num_tokens=report.num_tokens - told.num_tokens,
            seconds=report.seconds - told.seconds,
            saved_seconds=report.saved_seconds - told.saved_seconds,
            num_accepted=tuple(now - then for now, then in zip(report.num_accepted, before, strict=False)),
        )
        try:
            await self._thread.in_thread(append_learnt_line, self._folder, line)
        except OSError as error:
            log.warning("what the drafter cost is not written down: %s", error)

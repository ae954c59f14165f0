"""Sharing of learnt drafters between generators, and with later processes through the run folder."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from rlhfspec.engine.base import EngineProtocol, Learning, LearningReport, Learnt
from rlhfspec.errors import RLHFSpecError
from rlhfspec.messages.records import DraftWeights
from rlhfspec.runs.folder.learnt import LEARNT, LearntLine, append_learnt_line
from rlhfspec.stage.bus import StageBus
from rlhfspec.stage.threads import ComputeThread
from rlhfspec.training.checkpoint.learnt import read_learnt, write_learnt
from rlhfspec.training.weights import WeightStore

log = logging.getLogger("rlhfspec.stage")
_MORE, _MUCH_MORE = 1 / 4, 32768  # beyond the announced version: share of it, or tokens
_STAGGERED = 8  # generator n waits for n/8 more than the first, so that not all share at once
_REST = 50.0  # pause after sharing, as a multiple of the time it took
_MAX_SHARED_BYTES = 1 << 30  # larger drafters are not shared


class LearntSharing:
    """Exchange of learnt drafters with other generators. The engine's thread calls `take`, the event loop all else."""

    def __init__(
        self,
        engine: EngineProtocol,
        learner: Learning,
        bus: StageBus,
        weights: WeightStore,
        run_folder: Path,
        *,
        job: str,
        name: str,
    ) -> None:
        self.arrived: Learnt | None = None  # for `take`
        self._engine = engine
        self.learner = learner
        self._bus = bus
        self._weights = weights
        self._folder = run_folder
        self._job = job
        self._name = name
        self._start = secrets.token_hex(4)
        self._thread = ComputeThread(f"{name}-learnt")
        self._announced = 0  # newest known version
        self._handing_out: asyncio.Task[None] | None = None
        self._not_before = 0.0
        self._noted = LearningReport()
        self._noted_drafts = 0, 0  # verifications and their tokens
        self._noted_weights_version = engine.weights_version

    async def restore(self) -> None:
        """Load the drafter that an earlier process of this run saved."""
        try:
            found = await self._thread.in_thread(read_learnt, self._folder / LEARNT)
        except (RLHFSpecError, OSError) as error:
            log.warning("the saved drafter cannot be read, so learning starts over: %s", error)
            return
        if found is not None:
            self.arrived = Learnt(version=found[0], tensors=found[1])
            self._announced = found[0]

    async def fetch(self, records: Sequence[DraftWeights]) -> None:
        newest = max(records, key=lambda record: record.version)
        if newest.version <= max(self._announced, self.learner.report.version):
            return
        self._announced = newest.version
        try:
            tensors = await self._thread.in_thread(self._weights.get, newest.weights)
        except (RLHFSpecError, OSError) as error:
            log.warning("a drafter that learnt from %d tokens cannot be fetched: %s", newest.version, error)
        else:
            self.arrived = Learnt(version=newest.version, tensors=tensors)

    def take(self) -> None:
        arrived, self.arrived = self.arrived, None
        if arrived is None:
            return
        try:
            if self.learner.take(arrived):
                log.info("loaded a drafter that learnt from %d tokens", arrived.version)
        except RLHFSpecError as error:
            log.warning("a drafter that learnt from %d tokens cannot be loaded: %s", arrived.version, error)

    @property
    def is_due(self) -> bool:
        """Return whether the drafter learnt enough to be shared and was not shared recently."""
        is_busy = self._handing_out is not None and not self._handing_out.done()
        if is_busy or time.monotonic() < self._not_before:
            return False
        stagger = 1 + min(self._bus.worker, _STAGGERED) / _STAGGERED
        more = self.learner.report.version - self._announced
        return more > 0 and more >= stagger * min(_MORE * self._announced, _MUCH_MORE)

    @property
    def has_more(self) -> bool:
        return self.learner.report.version > self._announced

    def begin_handing_out(self, learnt: Learnt) -> None:
        self._handing_out = asyncio.create_task(self._hand_out(learnt))

    async def handed_out(self) -> None:
        if self._handing_out is not None:
            await self._handing_out

    def cancel(self) -> None:
        if self._handing_out is not None:
            self._handing_out.cancel()

    def close(self) -> None:
        self._thread.close()

    async def note_cost(self, *, is_last: bool = False) -> None:
        version = self._noted_weights_version
        if version == self._engine.weights_version and not is_last:
            return
        report, noted = self.learner.report, self._noted
        self._noted_weights_version = self._engine.weights_version
        if report == noted:
            return
        self._noted = report
        drafting = next((each for each in self._engine.stats().drafting if each.drafter == "model"), None)
        drafts = (drafting.num_verifications, drafting.num_tokens) if drafting else (0, 0)
        num_verifications, num_tokens = (now - then for now, then in zip(drafts, self._noted_drafts, strict=True))
        self._noted_drafts = drafts
        line = LearntLine(
            generator=self._name,
            unix_seconds=time.time(),
            weights_version=version,
            version=report.version,
            num_tokens=report.num_tokens - noted.num_tokens,
            seconds=report.seconds - noted.seconds,
            saved_seconds=report.saved_seconds - noted.saved_seconds,
            law=report.law_now,
            acceptance=drafting.acceptance if drafting else (),
            level_share=drafting.level_share if drafting else None,
            tokens_per_verification=num_tokens / num_verifications if num_verifications else None,
        )
        try:
            await self._thread.in_thread(append_learnt_line, self._folder, line)
        except OSError as error:
            log.warning("the cost of drafter learning cannot be recorded: %s", error)

    async def _hand_out(self, learnt: Learnt) -> None:
        """Save and publish the drafter. Errors are logged and left to the next attempt."""
        began = time.monotonic()
        self._announced = learnt.version
        num_bytes = sum(tensor.nbytes for tensor in learnt.tensors.values())
        if num_bytes > _MAX_SHARED_BYTES:
            log.warning("the drafter is too large to share: %d bytes, at most %d", num_bytes, _MAX_SHARED_BYTES)
            self._not_before = float("inf")
            return
        try:
            record = await self._thread.in_thread(self._put, learnt)
            await self._bus.publish(record)
        except (RLHFSpecError, OSError) as error:
            log.warning("the drafter that learnt from %d tokens cannot be shared: %s", learnt.version, error)
        now = time.monotonic()
        self._not_before = now + _REST * (now - began)

    def _put(self, learnt: Learnt) -> DraftWeights:
        write_learnt(self._folder / LEARNT, learnt.version, learnt.tensors, by=self._name)
        put = self._weights.put(self._job, "drafter", learnt.version, learnt.tensors)
        id = f"{put.id}/{self._name}/{self._start}"
        return DraftWeights(id=id, job=self._job, version=put.version, uri=put.uri, digest=put.digest)

"""What a generator says of itself: a record a few times a second for the eyes, and on each sample what it cost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count

from rlhfspec.engine.base import EngineProtocol, EngineStep
from rlhfspec.records import Load

EVERY_SECONDS = 0.25
Experts = tuple[tuple[str, tuple[int, ...]], ...]


class Meter:
    """Counts what the engine's steps report; `load` makes a record of it when one is due."""

    def __init__(
        self, job: str, name: str, engine: EngineProtocol, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self._job = job
        self._engine = engine
        self._now = now
        self._numbers = count()
        self._step = 0
        self._num_finished = 0
        self._num_tokens = 0
        self._strategies: Counter[str] = Counter()
        self._num_rows = self._num_drafted = self._num_committed = 0  # of decoding steps since the last record
        self._seconds = 0.0
        self._expert_rows: Mapping[str, tuple[int, ...]] = {}  # said so far
        self._last = self._experts_said = now()

    def submitted(self, step: int) -> None:
        if step > self._step:
            self._step, self._num_finished = step, 0

    def stepped(self, report: EngineStep) -> None:
        self._num_finished += len(report.finished)
        self._num_tokens += report.num_committed
        self._num_rows += report.num_decoding
        self._num_drafted += report.num_verified_nodes
        self._num_committed += report.num_committed
        self._seconds += report.seconds
        self._strategies[report.strategy] += 1

    def load(self) -> Load | None:
        """When it is due: from time to time, and when the engine has run out of work."""
        if not self._is_due(self._last) or not self._strategies:
            return None
        stats = self._engine.stats()
        accepted = max(self._num_committed / self._num_rows - 1.0, 0.0) if self._num_drafted else None
        record = Load(
            id=f"{self._job}/{self.name}/load/{next(self._numbers)}",
            job=self._job,
            generator=self.name,
            step=self._step,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_finished=self._num_finished,
            num_tokens=self._num_tokens,
            tokens_per_second=self._num_committed / self._seconds if self._seconds else 0.0,
            accepted_per_verification=accepted,
            strategy=self._strategies.most_common(1)[0][0],
        )
        self._last, self._seconds = self._now(), 0.0
        self._num_rows = self._num_drafted = self._num_committed = 0
        self._strategies.clear()
        return record

    def experts(self) -> Experts:
        """Rows that each expert ran and no sample has told of; nothing when they were told a moment ago.

        Every row is told once, the last ones with the last sample: then the engine has run dry.
        """
        if not self._is_due(self._experts_said):
            return ()
        self._experts_said = self._now()
        rows, before = self._engine.stats().expert_rows, self._expert_rows
        self._expert_rows = rows
        return tuple(
            (layer, tuple(now - then for now, then in zip(counts, before.get(layer, (0,) * len(counts)), strict=True)))
            for layer, counts in rows.items()
        )

    def _is_due(self, last: float) -> bool:
        return self._now() - last >= EVERY_SECONDS or not self._engine.has_work

"""What a generator says of itself a few times a second. Nothing that decides a token or a curve reads it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import count

from rlhfspec.engine.base import EngineProtocol, StepReport
from rlhfspec.records import Load

EVERY_SECONDS = 0.25


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
        self._num_rows = self._num_committed = 0  # of decoding steps since the last record
        self._seconds = 0.0
        self._expert_rows: Mapping[str, tuple[int, ...]] = {}  # until the last record
        self._last = now()

    def submitted(self, step: int) -> None:
        if step > self._step:
            self._step, self._num_finished = step, 0

    def stepped(self, report: StepReport) -> None:
        self._num_finished += len(report.finished)
        self._num_tokens += report.num_committed
        self._num_rows += report.num_decoding
        self._num_committed += report.num_committed
        self._seconds += report.seconds
        self._strategies[report.strategy] += 1

    def load(self) -> Load | None:
        """When it is due: from time to time, and when the engine has run out of work."""
        now = self._now()
        is_due = now - self._last >= EVERY_SECONDS or not self._engine.has_work
        if not is_due or not self._strategies:
            return None
        stats = self._engine.stats()
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
            accepted_per_verification=max(self._num_committed / self._num_rows - 1.0, 0.0) if self._num_rows else 0.0,
            strategy=self._strategies.most_common(1)[0][0],
            experts=tuple(self._experts_since(stats.expert_rows)),
        )
        self._expert_rows = stats.expert_rows
        self._last, self._seconds = now, 0.0
        self._num_rows = self._num_committed = 0
        self._strategies.clear()
        return record

    def _experts_since(self, rows: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
        for layer, counts in rows.items():
            before = self._expert_rows.get(layer, (0,) * len(counts))
            yield layer, tuple(now - then for now, then in zip(counts, before, strict=True))

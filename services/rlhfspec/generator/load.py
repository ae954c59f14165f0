from __future__ import annotations

import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from rlhfspec.engine.base import EngineProtocol, EngineStep, Learning, SequenceView
from rlhfspec.messages.records import Load
from rlhfspec.moves.rebalancing.curve import LearnedCurve

_EVERY_SECONDS, IDLE_EVERY_SECONDS = 0.25, 1.0
Experts = tuple[tuple[str, tuple[int, ...]], ...]


class LoadMeter:
    """Meter of the engine's steps for Load records. A new `incarnation` invalidates earlier ones."""

    def __init__(
        self,
        job: str,
        name: str,
        engine: EngineProtocol,
        *,
        worker: int = 0,
        incarnation: str = "",
        sequences: Callable[[], tuple[SequenceView, ...]] = tuple,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.worker = worker
        self.incarnation = incarnation or secrets.token_hex(8)
        self.is_leaving = False
        self._curve = LearnedCurve()
        self._host = socket.gethostname()
        self._job = job
        self._engine = engine
        self._sequences = sequences
        self._now = now
        self._numbers = count()
        self._step = 0
        self._num_finished = 0
        self._num_tokens = 0
        self._strategies: Counter[str] = Counter()
        self._num_rows = self._num_drafted = self._num_committed = 0  # of decoding steps since the last record
        self._seconds = 0.0
        self._expert_rows: Mapping[str, tuple[int, ...]] = {}  # reported so far
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
        self._learn(report)

    def _learn(self, report: EngineStep) -> None:
        num_decoding = report.num_decoding + report.num_paused
        tokens_each = report.num_committed / num_decoding if num_decoding else 0.0
        num_running, tokens_of_one = num_decoding / report.num_passes, tokens_each * report.num_passes
        if report.num_prefill_tokens:
            decoding = self._curve.seconds(num_running) * (tokens_of_one or 1.0)  # without decoding: a step's base
            self._curve.learn_prefill(report.num_prefill_tokens, report.seconds - decoding)
        elif tokens_each:
            self._curve.learn(num_running, report.seconds / tokens_of_one)

    @property
    def prefill_seconds(self) -> float:
        return self._curve.prefill_seconds

    def load(self) -> Load | None:
        """Return the load if due (periodically, and when the engine runs out of work), else None."""
        if not self._is_due(self._last) or not self._strategies:
            return None
        return self._record(self._strategies.most_common(1)[0][0])

    def now(self) -> Load:
        return self._record("")

    def idle(self) -> Load | None:
        """Return an idle engine's load if due, so that others can move work here, else None."""
        if self._engine.has_work or self._now() - self._last < IDLE_EVERY_SECONDS:
            return None
        return self._record("")

    def _record(self, strategy: str) -> Load:
        stats, sequences = self._engine.stats(), self._sequences()
        accepted = max(self._num_committed / self._num_rows - 1.0, 0.0) if self._num_drafted else None
        record = Load(
            id=f"{self._job}/{self.name}/load/{self.incarnation}/{next(self._numbers)}",
            job=self._job,
            generator=self.name,
            step=self._step,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_finished=self._num_finished,
            num_tokens=self._num_tokens,
            tokens_per_second=self._num_committed / self._seconds if self._seconds else 0.0,
            accepted_per_verification=accepted,
            strategy=strategy,
            worker=self.worker,
            incarnation=self.incarnation,
            host=self._host,
            weights_version=stats.weights_version,
            is_leaving=self.is_leaving,
            step_seconds=self._curve.step_seconds,
            sequence_seconds=self._curve.sequence_seconds,
            prefill_seconds=self._curve.prefill_seconds,
            prefill_tokens=sum(sequence.num_prefill for sequence in sequences),
            num_free_rows=max(stats.room - stats.num_waiting, 0),
            num_free_tokens=stats.num_free_tokens,
            num_prefilled=stats.num_prefill_tokens,
            num_found=stats.num_found_tokens,
            drafting=stats.drafting,
            **_learning(self._engine.abilities.learning),
            sample_ids=tuple(sequence.id for sequence in sequences),
            num_generated=tuple(sequence.num_generated for sequence in sequences),
            num_held=tuple(sequence.num_held for sequence in sequences),
        )
        self._last, self._seconds = self._now(), 0.0
        self._num_rows = self._num_drafted = self._num_committed = 0
        self._strategies.clear()
        return record

    def experts(self) -> Experts:
        """Return the number of tokens routed to each expert since the last report, or () if no report is due."""
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
        return self._now() - last >= _EVERY_SECONDS or not self._engine.has_work


def _learning(learning: Learning | None) -> dict[str, Any]:
    if learning is None:
        return {}
    report = learning.report
    return {
        "learning_seconds": report.seconds,
        "drafter_version": report.version,
        "saved_seconds": report.saved_seconds,
    }

"""What generators and workers do right now, of what Redis and NATS say of them: the newer of both counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlhfspec.messages import loop
from rlhfspec.messages.records import Record
from rlhfspec.runs.live.live import LiveView
from rlhfspec.runs.view.run_state import RunState, RunWorker, Told, after, without_gone
from rlhfspec.stage.vitals import WorkerState

_GONE_SECONDS = 30.0
_ORDER = {stage.name: place for place, stage in enumerate(loop.STAGES)}


class Live:
    """Draws a run's state for the page. Times are the clock's."""

    def __init__(self) -> None:
        self._run = RunState()
        self._told: list[Told] = []  # since
        self._owners: Mapping[str, str] = {}

    @property
    def num_generators(self) -> int:
        return len(self._now().generators)

    def heard(self, record: Record, now: float) -> None:
        self._told.append((now, record))

    def seen(self, view: LiveView, now: float) -> None:
        self._told += [(now - view.silent_seconds[name], snapshot) for name, snapshot in view.workers.items()]
        self._owners = view.owners

    def owner(self, sample: str) -> str:
        """Which worker makes it now; empty: nobody says so."""
        return self._owners.get(sample, "")

    def _now(self) -> RunState:
        self._run, self._told = after(self._run, self._told), []
        return self._run

    def content(self, now: float) -> dict[str, Any]:
        """For the page. A worker that has been silent for long is gone."""
        self._run = without_gone(self._now(), now=now, after_seconds=_GONE_SECONDS)
        told = [(worker, worker.state) for worker in self._run.workers.values() if worker.state is not None]
        told.sort(key=lambda each: (_ORDER[each[0].stage], each[0].worker))
        return {
            "generators": [_generator(worker, now) for worker in self._run.generators],
            "workers": [_worker(worker, state, now) for worker, state in told],
        }


def _generator(worker: RunWorker, now: float) -> dict[str, Any]:
    assert worker.load is not None
    load = worker.load
    return {
        "worker": load.worker,
        "host": load.host or worker.host,
        "step": load.step,
        "running": load.num_running,
        "waiting": load.num_waiting,
        "finished": load.num_finished,
        "tokens": load.num_tokens,
        "tokens_per_second": round(load.tokens_per_second, 1) if math.isfinite(load.tokens_per_second) else None,
        "accepted": _rounded(load.accepted_per_verification),
        "strategy": load.strategy[:60],
        "version": load.weights_version,
        "leaving": load.is_leaving,
        "silent": worker.is_load_silent(now),
    }


def _worker(worker: RunWorker, state: WorkerState, now: float) -> dict[str, Any]:
    is_silent = worker.is_silent(now)
    return {
        "stage": worker.stage,
        "worker": worker.worker,
        "doing": "silent" if is_silent else state.doing,
        "what": state.what[:200],
        "seconds": round(now - worker.heard_at if is_silent else state.since_seconds, 1),
        "busy": round(state.busy_seconds, 1),
        "host": worker.host,
        "pid": worker.pid,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 3)

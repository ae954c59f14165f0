"""Current activity of generators and workers, from Redis."""

from __future__ import annotations

import math
from typing import Any

from rlhfspec.runs.live.live import LiveView
from rlhfspec.runs.live.run_state import RunWorker, without_gone
from rlhfspec.runs.view.roster import ProcessState, process_states


class Live:
    def __init__(self) -> None:
        self._run = LiveView().run

    @property
    def num_generators(self) -> int:
        return len(self._run.generators)

    def seen(self, view: LiveView) -> None:
        self._run = view.run

    def owner(self, sample: str) -> str:
        key = self._run.owners.get(sample)
        return f"{key[0]}-{key[1]}" if key else ""

    def content(self, now: float) -> dict[str, Any]:
        """Return the state for the page, without workers that have long been silent."""
        self._run = without_gone(self._run, now=now)
        return {
            "generators": [_generator(worker, now) for worker in self._run.generators],
            "workers": [_worker(state) for state in process_states(self._run, now)],
        }


def _generator(worker: RunWorker, now: float) -> dict[str, Any]:
    assert worker.load is not None
    load = worker.load
    return {
        "worker": load.worker,
        "host": load.host or (worker.info.host if worker.info else ""),
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


def _worker(state: ProcessState) -> dict[str, Any]:
    return {
        "stage": state.stage,
        "worker": state.worker,
        "doing": state.doing,
        "what": state.what[:200],
        "seconds": round(state.since_seconds, 1),
        "busy": round(state.busy_seconds, 1),
        "host": state.host,
        "pid": state.pid,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 3)

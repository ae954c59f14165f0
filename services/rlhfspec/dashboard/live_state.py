"""What generators and workers do right now, of what Redis and NATS say of them: the newer of both counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rlhfspec.messages import loop
from rlhfspec.messages.records import Heartbeat, Load, Record
from rlhfspec.runs.live.live import LiveView, WorkerSnapshot
from rlhfspec.stage.silence import is_silent
from rlhfspec.stage.vitals import WorkerState

_GONE_SECONDS = 30.0
_ORDER = {stage.name: place for place, stage in enumerate(loop.STAGES)}


@dataclass(frozen=True, slots=True)
class _LastHeard:
    at: float
    what: WorkerState | Heartbeat
    host: str = ""
    pid: int = 0


class Live:
    """Times are the clock's."""

    def __init__(self) -> None:
        self.loads: dict[int, tuple[float, Load]] = {}
        self._workers: dict[tuple[str, int], _LastHeard] = {}
        self._owners: dict[str, str] = {}

    def heard(self, record: Record, now: float) -> None:
        if isinstance(record, Load):
            self.loads[record.worker] = (now, record)
        elif isinstance(record, Heartbeat) and record.stage in _ORDER:
            before = self._workers.get((record.stage, record.worker))
            host, pid = (before.host, before.pid) if before else ("", 0)
            self._workers[record.stage, record.worker] = _LastHeard(now, record, host, pid)

    def seen(self, view: LiveView, now: float) -> None:
        for name, snapshot in view.workers.items():
            self._snapshot(snapshot, now - view.silent_seconds[name])
        self._owners = view.owners

    def owner(self, sample: str) -> str:
        """Which worker makes it now; empty: nobody says so."""
        return self._owners.get(sample, "")

    def _snapshot(self, snapshot: WorkerSnapshot, at: float) -> None:
        place = snapshot.state.stage, snapshot.state.worker
        if place[0] in _ORDER and ((before := self._workers.get(place)) is None or before.at <= at or not before.pid):
            self._workers[place] = _LastHeard(at, snapshot.state, snapshot.host, snapshot.pid)
        load = snapshot.load
        if load is not None and ((last := self.loads.get(load.worker)) is None or last[0] <= at):
            self.loads[load.worker] = (at, load)

    def content(self, now: float) -> dict[str, Any]:
        """For the page. Who has been silent for long is gone."""
        self.loads = {worker: said for worker, said in self.loads.items() if now - said[0] < _GONE_SECONDS}
        self._workers = {place: said for place, said in self._workers.items() if now - said.at < _GONE_SECONDS}
        states = {place[1]: said for place, said in self._workers.items() if place[0] == "generator"}
        return {
            "generators": [
                _generator(load, at, states.get(worker), now) for worker, (at, load) in sorted(self.loads.items())
            ],
            "workers": [
                _worker(said, now)
                for _, said in sorted(self._workers.items(), key=lambda each: (_ORDER[each[0][0]], each[0][1]))
            ],
        }


def _generator(load: Load, at: float, said: _LastHeard | None, now: float) -> dict[str, Any]:
    return {
        "worker": load.worker,
        "host": load.host or (said.host if said else ""),
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
        "silent": is_silent(now - at),
    }


def _worker(said: _LastHeard, now: float) -> dict[str, Any]:
    silent = now - said.at
    return {
        "stage": said.what.stage,
        "worker": said.what.worker,
        "doing": "silent" if is_silent(silent) else said.what.doing,
        "what": said.what.what[:200],
        "seconds": round(silent if is_silent(silent) else said.what.since_seconds, 1),
        "busy": round(said.what.busy_seconds, 1),
        "host": said.host,
        "pid": said.pid,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 3)

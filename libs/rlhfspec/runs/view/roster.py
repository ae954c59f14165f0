"""Workers of a run in readable form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlhfspec.messages.loop import BY_NAME
from rlhfspec.messages.records import Load
from rlhfspec.runs.live.run_state import RunState, RunWorker

_ORDER = {name: place for place, name in enumerate(BY_NAME)}
ProcessDoing = Literal["starting", "working", "waiting", "silent", "restarting", "held", "left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    stage: str
    worker: int
    pid: int | None
    doing: ProcessDoing
    what: str
    since_seconds: float
    busy_seconds: float
    num_restarts: int = 0
    by_hand: bool = False
    waits_for: tuple[str, ...] = ()  # workers that could end its wait and are not waiting themselves
    host: str = ""
    load: Load | None = None  # of a generator

    @property
    def name(self) -> str:
        return f"{self.stage} {self.worker}"


def process_states(run: RunState, now: float) -> list[ProcessState]:
    """Return the states of workers of which more than a load is known, in the order of the loop's stages."""
    known = [worker for worker in run.workers.values() if worker.is_known]
    known.sort(key=lambda worker: (_ORDER[worker.stage], worker.worker))
    return [_state(worker, known, now) for worker in known]


def _state(worker: RunWorker, workers: Sequence[RunWorker], now: float) -> ProcessState:
    doing, what, since = _doing(worker, now)
    return ProcessState(
        stage=worker.stage,
        worker=worker.worker,
        pid=worker.pid,
        doing=doing,
        what=what,
        since_seconds=since,
        busy_seconds=worker.state.busy_seconds if worker.state is not None else 0.0,
        num_restarts=worker.process.num_restarts if worker.process is not None else 0,
        by_hand=worker.is_by_hand,
        waits_for=_could_end(worker, workers) if doing == "waiting" else (),
        host=worker.info.host if worker.info is not None else "",
        load=worker.load,
    )


def _doing(worker: RunWorker, now: float) -> tuple[ProcessDoing, str, float]:
    phase, state, process = worker.phase, worker.state, worker.process
    if phase == "held":
        return phase, "stopped from outside (SIGCONT resumes it)", now - worker.held_at
    if process is not None and phase in ("restarting", "left"):
        return phase, process.what, now - worker.process_at
    if worker.is_silent(now):
        return "silent", "no heartbeat from it", now - worker.spoke_at
    if state is None or state.doing == "stopped":
        began = max(worker.ready_at, worker.process_at)
        return "starting", "its process starts" if state is None else "ends", now - max(began, worker.held_at)
    return "starting" if phase == "starting" else state.doing, state.what, state.since_seconds + now - worker.heard_at


def _could_end(worker: RunWorker, workers: Sequence[RunWorker]) -> tuple[str, ...]:
    """Return the upstream workers that could end this worker's wait, or the upstream stages if all of them wait."""
    before = BY_NAME[worker.stage].unblocked_by
    busy = [
        f"{other.stage} {other.worker}"
        for other in workers
        if other.stage in before
        and other.phase != "left"
        and not (other.phase == "running" and other.state is not None and other.state.doing == "waiting")
    ]
    there = {other.stage for other in workers}
    return tuple(busy) or tuple(stage for stage in before if stage in there)

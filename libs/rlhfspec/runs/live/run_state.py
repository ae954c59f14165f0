"""State of a run's workers, reduced from records and events.

The newest information about a worker counts, so order and repetition change nothing, if `busy_seconds` only grows in a
process. Times are readings of the listener's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from rlhfspec.messages.loop import BY_NAME
from rlhfspec.messages.records import Heartbeat, Load, Plan, Record, WorkerInfo
from rlhfspec.messages.transport.clock import Clock
from rlhfspec.stage.vitals import WorkerState

NEVER = float("-inf")
# Idle workers send a heartbeat every two seconds (`rlhfspec.stage.pace`), so silence means a problem.
SILENT_SECONDS = 15.0  # without news: the event loop is dead, the process stopped, or the server away
GONE_SECONDS = 30.0  # without news: the worker no longer counts
WorkerKey = tuple[str, int]  # (stage, number)
Phase = Literal["starting", "running", "restarting", "held", "left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessNews:
    """Start or end of a worker's process, which voids earlier information about the worker."""

    stage: str
    worker: int
    phase: Literal["starting", "restarting", "left"]
    what: str = ""
    pid: int | None = None
    num_restarts: int = 0
    by_hand: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldNews:
    stage: str
    worker: int
    is_held: bool


News = Record | ProcessNews | HeldNews
Told = tuple[float, News]  # (time, news)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWorker:
    """State of one worker; unknown parts are None, with the time NEVER."""

    stage: str
    worker: int
    state: WorkerState | None = None
    heard_at: float = NEVER  # time of `state`
    busy_at: float = NEVER  # when its busy_seconds last grew
    load: Load | None = None  # of a generator
    loaded_at: float = NEVER
    info: WorkerInfo | None = None  # once it is ready
    ready_at: float = NEVER
    process: ProcessNews | None = None
    process_at: float = NEVER
    is_held: bool = False
    held_at: float = NEVER  # or released

    @property
    def key(self) -> WorkerKey:
        return self.stage, self.worker

    @property
    def name(self) -> str:
        return f"{self.stage}-{self.worker}"

    @property
    def phase(self) -> Phase:
        if self.process is not None and self.process.phase != "starting":
            return self.process.phase
        if self.is_held:
            return "held"
        is_running = self.info is not None or (self.process is None and self.state is not None)
        return "running" if is_running else "starting"

    @property
    def pid(self) -> int | None:
        if self.process is not None and self.process.pid is not None:
            return self.process.pid
        return None if self.info is None else self.info.pid

    @property
    def is_by_hand(self) -> bool:
        return self.process is not None and self.process.by_hand

    @property
    def spoke_at(self) -> float:
        """Return the time of the last news other than loads."""
        return max(self.heard_at, self.ready_at, self.process_at, self.held_at)

    @property
    def is_known(self) -> bool:
        """Return whether anything but a load is known."""
        return self.spoke_at > NEVER

    @property
    def worked_at(self) -> float:
        works = self.state is not None and self.state.doing == "working"
        return max(self.busy_at, self.ready_at, self.process_at, self.held_at, self.heard_at if works else NEVER)

    @property
    def has_stopped(self) -> bool:
        return self.state is not None and self.state.doing == "stopped"

    def is_silent(self, now: float) -> bool:
        return now - self.spoke_at > SILENT_SECONDS

    def is_load_silent(self, now: float) -> bool:
        return now - self.loaded_at > SILENT_SECONDS

    def later(self, seconds: float) -> RunWorker:
        return replace(
            self, heard_at=self.heard_at + seconds, busy_at=self.busy_at + seconds, loaded_at=self.loaded_at + seconds,
            ready_at=self.ready_at + seconds, process_at=self.process_at + seconds, held_at=self.held_at + seconds,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of a run; the latest plan wants `num_wanted` generators."""

    workers: Mapping[WorkerKey, RunWorker] = field(default_factory=dict)
    num_wanted: int | None = None
    wanted_at: float = NEVER

    @property
    def there(self) -> list[RunWorker]:
        return [worker for worker in self.workers.values() if worker.is_known and worker.phase != "left"]

    @property
    def generators(self) -> list[RunWorker]:
        found = (worker for worker in self.workers.values() if worker.load is not None)
        return sorted(found, key=lambda worker: worker.worker)

    @property
    def infos(self) -> list[WorkerInfo]:
        return [worker.info for worker in self.workers.values() if worker.info is not None]

    @property
    def states(self) -> list[WorkerState]:
        running = (worker for worker in self.workers.values() if worker.phase in ("starting", "running"))
        return [worker.state for worker in running if worker.state is not None]

    @property
    def owners(self) -> dict[str, WorkerKey]:
        """Return the generator that holds each sample id, by the latest loads."""
        by_time = sorted(self.generators, key=lambda worker: worker.loaded_at)
        return {sample: each.key for each in by_time if each.load is not None for sample in each.load.sample_ids}

    def is_only_worker(self, key: WorkerKey) -> bool:
        return all(worker.stage != key[0] or worker.key == key for worker in self.there)

    def quiet_seconds(self, now: float) -> float:
        return min((now - each.worked_at for each in self.workers.values() if each.is_known), default=0.0)

    def all_run(self, now: float) -> bool:
        return all(worker.phase == "running" and not worker.is_silent(now) for worker in self.there)


class KnownRun:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._run = RunState()
        self._told: list[Told] = []  # not yet reduced

    def tell(self, *news: News) -> None:
        now = self.clock.now()
        self._told += [(now, each) for each in news]

    @property
    def run(self) -> RunState:
        if self._told:
            self._run, self._told = after(self._run, self._told), []
        return self._run


def after(run: RunState, told: Iterable[Told]) -> RunState:
    """Return the state after all (time, news) pairs, copying the workers once."""
    workers = dict(run.workers)
    for at, news in told:
        match news:
            case Plan():
                if news.num_wanted > 0 and at >= run.wanted_at:
                    run = replace(run, num_wanted=news.num_wanted, wanted_at=at)
            case Load():
                worker = _worker(workers, ("generator", news.worker))
                if at >= worker.loaded_at:
                    workers[worker.key] = replace(worker, load=news, loaded_at=at)
            case Heartbeat() | WorkerInfo() | ProcessNews() | HeldNews() if news.stage in BY_NAME:
                worker = _worker(workers, (news.stage, news.worker))
                if at >= worker.process_at:
                    workers[worker.key] = _after(worker, news, at)
    return replace(run, workers=workers)


def without_gone(run: RunState, *, now: float, after_seconds: float = GONE_SECONDS) -> RunState:
    """Return the state without loads and workers older than `after_seconds`; held and restarting workers stay."""
    kept = {}
    for key, worker in run.workers.items():
        if now - worker.loaded_at >= after_seconds or worker.phase == "left":
            worker = replace(worker, load=None, loaded_at=NEVER)
        is_awaited = worker.phase in ("held", "restarting")
        if worker.phase == "left" or (now - worker.spoke_at >= after_seconds and not is_awaited):
            worker = RunWorker(stage=worker.stage, worker=worker.worker, load=worker.load, loaded_at=worker.loaded_at)
        if max(worker.spoke_at, worker.loaded_at) > NEVER:
            kept[key] = worker
    return replace(run, workers=kept)


def worker_state(beat: Heartbeat) -> WorkerState:
    return WorkerState(**{own.name: getattr(beat, own.name) for own in fields(WorkerState)})


def _worker(workers: Mapping[WorkerKey, RunWorker], key: WorkerKey) -> RunWorker:
    return workers.get(key) or RunWorker(stage=key[0], worker=key[1])


def _after(worker: RunWorker, news: Heartbeat | WorkerInfo | ProcessNews | HeldNews, at: float) -> RunWorker:
    """Return the worker updated by news; outdated news changes nothing."""
    match news:
        case Heartbeat():
            return _heard(worker, news, at)
        case WorkerInfo() if at >= worker.ready_at:
            return replace(worker, info=news, ready_at=at)
        case HeldNews() if at >= worker.held_at:
            return replace(worker, is_held=news.is_held, held_at=at)
        case ProcessNews():
            worker = replace(worker, process=news, process_at=at)
            if worker.heard_at <= at:
                worker = replace(worker, state=None, heard_at=NEVER, busy_at=NEVER)
            if worker.ready_at <= at:
                worker = replace(worker, info=None, ready_at=NEVER)
            return worker if worker.held_at > at else replace(worker, is_held=False, held_at=NEVER)
    return worker


def _heard(worker: RunWorker, beat: Heartbeat, at: float) -> RunWorker:
    before = worker.state.busy_seconds if worker.state is not None else None
    if at >= worker.heard_at:
        busy_at = worker.busy_at if beat.busy_seconds == before else at
        return replace(worker, state=worker_state(beat), heard_at=at, busy_at=busy_at)
    if beat.busy_seconds == before:
        return replace(worker, busy_at=min(worker.busy_at, at))
    return worker

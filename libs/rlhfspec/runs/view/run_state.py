"""What is known of a run's workers, in one shape, by one pure reducer: a record or a snapshot in, the next state out.

Of what is told of a worker the newest counts, whichever way it came (NATS or Redis), and in whatever order: the same
things told in another order, or twice, make the same state. Times are readings of one clock, by the listener.

Example:
    >>> from rlhfspec.messages.records import Heartbeat
    >>> beat = Heartbeat(
    ...     id="b", job="sums", stage="reward", worker=0, doing="waiting", what="samples", since_seconds=1.0,
    ...     overdue_seconds=-1.0, busy_seconds=0.0,
    ... )
    >>> run = after(RunState(), [(10.0, beat)])
    >>> [worker] = run.workers.values()
    >>> worker.state.what, worker.is_silent(20.0), worker.is_silent(30.0)
    ('samples', False, True)
    >>> without_gone(run, now=50.0, after_seconds=30.0).workers
    {}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rlhfspec.messages.loop import BY_NAME
from rlhfspec.messages.records import Heartbeat, Load, Plan, Record
from rlhfspec.runs.live.live import WorkerSnapshot
from rlhfspec.runs.view.roster import worker_state
from rlhfspec.stage.silence import is_silent
from rlhfspec.stage.vitals import WorkerState

NEVER = float("-inf")
WorkerKey = tuple[str, int]  # stage, and its number there
Told = tuple[float, Record | WorkerSnapshot]  # when, and what


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWorker:
    """One worker. A state or load that was never told is None; host and process are told by snapshots alone."""

    stage: str
    worker: int
    state: WorkerState | None = None
    heard_at: float = NEVER  # of `state`
    load: Load | None = None  # of a generator
    loaded_at: float = NEVER
    host: str = ""
    pid: int = 0
    placed_at: float = NEVER  # of `host` and `pid`

    @property
    def last_at(self) -> float:
        return max(self.heard_at, self.loaded_at)

    def is_silent(self, now: float) -> bool:
        """Return whether it has not said for long what it does."""
        return is_silent(now - self.heard_at)

    def is_load_silent(self, now: float) -> bool:
        """Return whether it has not said for long what it has."""
        return is_silent(now - self.loaded_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """`num_wanted`: so many generators would pay, by the last plan that knew it; None: none did yet."""

    workers: Mapping[WorkerKey, RunWorker] = field(default_factory=dict)
    num_wanted: int | None = None
    why_wanted: str = ""
    wanted_at: float = NEVER

    @property
    def generators(self) -> list[RunWorker]:
        """Those that told their load, by number."""
        found = (worker for worker in self.workers.values() if worker.load is not None)
        return sorted(found, key=lambda worker: worker.worker)


def after(run: RunState, told: Iterable[Told]) -> RunState:
    """Return the state after all that was told, each with when. What tells nothing of a worker of the loop changes
    nothing. The workers are copied once: give what came together together."""
    workers = dict(run.workers)
    for at, news in told:
        match news:
            case Heartbeat() if news.stage in BY_NAME:
                _told(workers, (news.stage, news.worker), "heard_at", at, state=worker_state(news))
            case Load():
                _told(workers, ("generator", news.worker), "loaded_at", at, load=news)
            case Plan() if news.num_wanted > 0 and at >= run.wanted_at:
                run = replace(run, num_wanted=news.num_wanted, why_wanted=news.why_wanted, wanted_at=at)
            case WorkerSnapshot() if news.state.stage in BY_NAME:
                _seen(workers, news, at)
    return replace(run, workers=workers)


def without_gone(run: RunState, *, now: float, after_seconds: float) -> RunState:
    """Return the state without what is so old: a worker that says nothing, or a load that is not told again."""
    kept = {}
    for key, worker in run.workers.items():
        if now - worker.heard_at >= after_seconds:
            worker = replace(worker, state=None, heard_at=NEVER, host="", pid=0, placed_at=NEVER)
        if now - worker.loaded_at >= after_seconds:
            worker = replace(worker, load=None, loaded_at=NEVER)
        if worker.last_at > NEVER:
            kept[key] = worker
    return replace(run, workers=kept)


def _seen(workers: dict[WorkerKey, RunWorker], snapshot: WorkerSnapshot, at: float) -> None:
    """What a worker wrote of itself."""
    key = (snapshot.state.stage, snapshot.state.worker)
    _told(workers, key, "heard_at", at, state=snapshot.state)
    _told(workers, key, "placed_at", at, host=snapshot.host, pid=snapshot.pid)
    if snapshot.load is not None:
        _told(workers, ("generator", snapshot.load.worker), "loaded_at", at, load=snapshot.load)


def _told(workers: dict[WorkerKey, RunWorker], key: WorkerKey, when: str, at: float, **news: object) -> None:
    """`news`: fields of the worker, told at a time that is kept under the name `when`; older ones change nothing."""
    worker = workers.get(key) or RunWorker(stage=key[0], worker=key[1])
    if at >= getattr(worker, when):
        workers[key] = replace(worker, **news, **{when: at})  # type: ignore[arg-type]

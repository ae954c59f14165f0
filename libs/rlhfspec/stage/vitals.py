"""Current activity of each worker, for supervisor, live view and step report.

Example:
    >>> from rlhfspec.messages.transport.clock import FakeClock
    >>> vitals = Vitals(FakeClock())
    >>> worker = vitals.worker("reward", 0)
    >>> with worker.working("scoring sums/3/7/1", deadline_seconds=60.0) as worked:
    ...     with worked.at("scoring sums/3/7/1 with source digits"):
    ...         vitals.snapshot()[0].what
    'scoring sums/3/7/1 with source digits'
    >>> vitals.snapshot()[0].doing
    'waiting'
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from rlhfspec.messages.records import Doing
from rlhfspec.messages.transport.clock import Clock, SystemClock

SAID_NOTHING = "something it does not name"
MOST_NOTED = 3  # activities that are named; the rest is counted
Told = Callable[[str, int, str, float], None]  # stage, worker, activity, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    stage: str
    worker: int
    doing: Doing
    what: str
    since_seconds: float  # duration of this activity
    overdue_seconds: float  # past the deadline; negative: time left; -inf: not working
    busy_seconds: float  # total working time; its difference over time is the utilisation
    trouble: str = ""  # what fails and is retried

    def without_times(self) -> WorkerState:
        """Return the state with times set to 0, equal until something changes."""
        return replace(self, since_seconds=0.0, overdue_seconds=0.0, busy_seconds=0.0)


@dataclass(frozen=True, slots=True)
class _Activity:
    what: str
    began: float
    deadline: float
    parts: list[str] = field(default_factory=list)  # parts in progress

    @property
    def now(self) -> str:
        return _some(self.parts) or self.what


def _some(whats: Sequence[str]) -> str:
    """Join the first activities and count the rest.

    >>> _some(["scoring a", "scoring b", "scoring c", "scoring d"])
    'scoring a; scoring b; scoring c; and 1 more'
    """
    return "; ".join([*whats[:MOST_NOTED], *([f"and {len(whats) - MOST_NOTED} more"] if whats[MOST_NOTED:] else [])])


class Worked:
    def __init__(self, activity: _Activity, changed: Callable[[], None]) -> None:
        self.seconds = 0.0
        self._activity = activity
        self._changed = changed

    @contextmanager
    def at(self, what: str) -> Iterator[None]:
        self._activity.parts.append(what)
        self._changed()
        try:
            yield
        finally:
            self._activity.parts.remove(what)
            self._changed()


class WorkerVitals:
    """Current activities of one worker, which may overlap."""

    def __init__(
        self,
        stage: str,
        worker: int,
        clock: Clock,
        told: Told = lambda *_: None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.stage = stage
        self.worker = worker
        self._clock = clock
        self._told = told
        self._changed = changed
        self._lock = threading.Lock()
        self._keys = itertools.count()
        self._work: dict[int, _Activity] = {}
        self._waits: dict[int, _Activity] = {}
        self._idle = _Activity(SAID_NOTHING, clock.now(), float("inf"))
        self._stopped: _Activity | None = None
        self._last_worked = clock.now()
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._trouble = ""

    def in_trouble(self, what: str) -> None:
        """Report a failure that is being retried, or its end if `what` is empty."""
        self._trouble = what
        self._changed()

    @contextmanager
    def working(self, what: str, *, deadline_seconds: float) -> Iterator[Worked]:
        """Report work inside the block, which ends the run with an error if it exceeds the deadline."""
        with self._lock:
            now = self._clock.now()
            key = next(self._keys)
            if not self._work:
                self._busy_since = now
            activity = self._work[key] = _Activity(what, now, now + deadline_seconds)
        worked = Worked(activity, self._changed)
        self._changed()
        try:
            yield worked
        finally:
            with self._lock:
                worked.seconds = self._clock.now() - now
                self._end_work(key)
            self._changed()
            self._told(self.stage, self.worker, what, worked.seconds)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Report a wait inside the block, merging repeated waits for the same thing."""
        with self._lock:
            key = next(self._keys)
            same = self._idle.what == what
            activity = self._idle if same else _Activity(what, self._clock.now(), float("inf"))
            self._waits[key] = activity
        try:
            yield
        finally:
            with self._lock:
                del self._waits[key]
                self._idle = activity

    def stopped(self) -> None:
        with self._lock:
            self._stopped = self._stopped or _Activity("", self._clock.now(), float("inf"))

    def quiet_seconds(self) -> float:
        with self._lock:
            return 0.0 if self._work else self._clock.now() - self._last_worked

    def state(self) -> WorkerState:
        with self._lock:
            now = self._clock.now()
            doing, activity = self._now_doing()
            return WorkerState(
                stage=self.stage,
                worker=self.worker,
                doing=doing,
                what=activity.now,
                since_seconds=now - activity.began,
                overdue_seconds=now - activity.deadline,
                busy_seconds=self._busy_seconds + (now - self._busy_since if self._work else 0.0),
                trouble=self._trouble,
            )

    def work(self) -> list[str]:
        """Return the texts of activities in progress, or of their parts if any are reported."""
        with self._lock:
            activities = list(self._work.values())
        return [part for activity in activities for part in activity.parts] or [each.what for each in activities]

    def _now_doing(self) -> tuple[Doing, _Activity]:
        if self._stopped is not None:
            return "stopped", self._stopped
        if self._work:
            return "working", min(self._work.values(), key=lambda activity: activity.deadline)
        if self._waits:
            return "waiting", min(self._waits.values(), key=lambda activity: activity.began)
        return "waiting", self._idle

    def _end_work(self, key: int) -> None:
        del self._work[key]
        if not self._work:
            now = self._clock.now()
            self._busy_seconds += now - self._busy_since
            self._last_worked = now
            self._idle = _Activity(SAID_NOTHING, now, float("inf"))


class Vitals:
    """Activities of a process's workers; `told` is called after each piece of work, `note` at each change."""

    def __init__(
        self, clock: Clock | None = None, *, told: Told | None = None, note: Callable[[str], None] | None = None
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self.told = told
        self.note = note
        self._noting = threading.Lock()
        self._awaited: list[Callable[[], object]] = []  # callbacks waiting for the next change
        self._workers: dict[tuple[str, int], WorkerVitals] = {}

    def worker(self, stage: str, worker: int) -> WorkerVitals:
        key = (stage, worker)
        if key not in self._workers:
            self._workers[key] = WorkerVitals(stage, worker, self.clock, self._tell, self._note)
        return self._workers[key]

    def _tell(self, stage: str, worker: int, what: str, seconds: float) -> None:
        if self.told is not None:
            self.told(stage, worker, what, seconds)

    async def until_change(self) -> None:
        changed, loop = asyncio.Event(), asyncio.get_running_loop()
        tell = partial(loop.call_soon_threadsafe, changed.set)
        self._awaited.append(tell)
        try:
            await changed.wait()
        finally:
            self._awaited.remove(tell)

    def _note(self) -> None:
        for tell in list(self._awaited):
            tell()
        if self.note is None:
            return
        with self._noting:  # so that the last note is the current one
            self.note(_some([what for worker in list(self._workers.values()) for what in worker.work()]))

    def snapshot(self) -> tuple[WorkerState, ...]:
        return tuple(worker.state() for worker in list(self._workers.values()))

    def quiet_seconds(self) -> float:
        """Return the seconds since any worker last worked; 0 while one works, or without workers."""
        return min((worker.quiet_seconds() for worker in list(self._workers.values())), default=0.0)

"""What each worker does right now, for the supervisor, the live view and the report of a step.

Example:
    >>> from rlhfspec.transport.clock import FakeClock
    >>> vitals = Vitals(FakeClock())
    >>> worker = vitals.worker("reward", 0)
    >>> with worker.working("reward of sums/3/7/1", deadline_seconds=60.0):
    ...     vitals.snapshot()[0].doing
    'working'
    >>> vitals.snapshot()[0].doing
    'waiting'
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlhfspec.records import Doing
from rlhfspec.transport.clock import Clock, SystemClock

SAID_NOTHING = "something it does not name"
Told = Callable[[str, int, str, float], None]  # stage, worker, what it did, and for how many seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    stage: str
    worker: int
    doing: Doing
    what: str
    since_seconds: float  # how long it has been doing that
    overdue_seconds: float  # past the deadline of its work; negative: so much is left; -inf: not working
    busy_seconds: float  # working, in all; by its difference over time a worker's utilisation
    trouble: str = ""  # what fails, and is tried again


@dataclass(frozen=True, slots=True)
class _Activity:
    what: str
    began: float
    deadline: float


@dataclass(slots=True)
class Worked:
    """How long a piece of work took; known at its end."""

    seconds: float = 0.0


class WorkerVitals:
    """One worker's side of it. Several activities may overlap: it works while any of them is work."""

    def __init__(self, stage: str, worker: int, clock: Clock, told: Told = lambda *_: None) -> None:
        self.stage = stage
        self.worker = worker
        self._clock = clock
        self._told = told
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
        """What fails, and is tried again; empty: nothing any more."""
        self._trouble = what

    @contextmanager
    def working(self, what: str, *, deadline_seconds: float) -> Iterator[Worked]:
        """Busy with this; the run ends, naming it, when it takes longer than the deadline."""
        worked = Worked()
        with self._lock:
            now = self._clock.now()
            key = next(self._keys)
            if not self._work:
                self._busy_since = now
            self._work[key] = _Activity(what, now, now + deadline_seconds)
        try:
            yield worked
        finally:
            with self._lock:
                worked.seconds = self._clock.now() - now
                self._end_work(key)
            self._told(self.stage, self.worker, what, worked.seconds)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Nothing to do until this comes. Waiting for the same again, without work between, is one long wait."""
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
        """Said by the supervisor when the worker's `run` is over; saying it again changes nothing."""
        with self._lock:
            self._stopped = self._stopped or _Activity("", self._clock.now(), float("inf"))

    def quiet_seconds(self) -> float:
        """Since it last worked."""
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
                what=activity.what,
                since_seconds=now - activity.began,
                overdue_seconds=now - activity.deadline,
                busy_seconds=self._busy_seconds + (now - self._busy_since if self._work else 0.0),
                trouble=self._trouble,
            )

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
    """All workers of this process."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self.told: Told | None = None  # of every piece of work, when it ends
        self._workers: dict[tuple[str, int], WorkerVitals] = {}

    def worker(self, stage: str, worker: int) -> WorkerVitals:
        """The one of this name; made at the first call."""
        key = (stage, worker)
        if key not in self._workers:
            self._workers[key] = WorkerVitals(stage, worker, self.clock, self._tell)
        return self._workers[key]

    def _tell(self, stage: str, worker: int, what: str, seconds: float) -> None:
        if self.told is not None:
            self.told(stage, worker, what, seconds)

    def snapshot(self) -> tuple[WorkerState, ...]:
        """In the order in which the workers were made."""
        return tuple(worker.state() for worker in list(self._workers.values()))

    def quiet_seconds(self) -> float:
        """Since anybody last worked; 0 while somebody does, and when nobody is there."""
        return min((worker.quiet_seconds() for worker in list(self._workers.values())), default=0.0)

"""Who is in a run, as its processes say and as the system says: each worker's process, what it does, since when.

Example:
    >>> from rlhfspec.messages.transport.clock import FakeClock
    >>> roster = Roster(FakeClock())
    >>> roster.started("reward", 0, pid=71)
    >>> [state] = roster.states()
    >>> state.name, state.doing, state.what
    ('reward 0', 'starting', 'its process starts')
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhfspec.messages.loop import BY_NAME
from rlhfspec.messages.records import Heartbeat, WorkerInfo
from rlhfspec.messages.transport.clock import Clock
from rlhfspec.stage.silence import is_silent
from rlhfspec.stage.vitals import WorkerState

_ORDER = {name: place for place, name in enumerate(BY_NAME)}
Phase = Literal["starting", "running", "restarting", "held", "left"]
ProcessDoing = Literal["starting", "working", "waiting", "silent", "restarting", "held", "left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """What a person sees of one worker's process. `held`: somebody stopped it (SIGSTOP); `silent`: no heartbeats."""

    stage: str
    worker: int
    pid: int | None
    doing: ProcessDoing
    what: str
    since_seconds: float
    busy_seconds: float
    num_restarts: int = 0
    by_hand: bool = False
    waits_for: tuple[str, ...] = ()  # the workers that could end its wait, and have something to do

    @property
    def name(self) -> str:
        return f"{self.stage} {self.worker}"


@dataclass(slots=True)
class _Member:
    stage: str
    worker: int
    pid: int | None
    phase: Phase
    what: str
    since: float
    heard_at: float
    worked_at: float
    by_hand: bool = False
    num_starts: int = 0
    info: WorkerInfo | None = None
    beat: Heartbeat | None = None

    @property
    def num_restarts(self) -> int:
        return max(self.num_starts - 1, 0)


class Roster:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._members: dict[tuple[str, int], _Member] = {}

    def started(self, stage: str, worker: int, *, pid: int | None) -> None:
        """Its process, or the next one in its place."""
        member = self._member(stage, worker)
        member.info = member.beat = None
        member.pid = pid
        member.num_starts += 1
        self._is(member, "starting", "its process starts")

    def is_down(self, stage: str, worker: int, phase: Phase, why: str) -> None:
        member = self._member(stage, worker)
        member.info = member.beat = member.pid = None
        self._is(member, phase, why)

    def held(self, stage: str, worker: int, is_held: bool) -> None:
        member = self._member(stage, worker)
        if is_held != (member.phase == "held"):
            self._is(member, "held" if is_held else "running", "stopped from outside (SIGCONT lets it go on)")

    def joined(self, info: WorkerInfo) -> bool:
        """It is ready. True for one that nobody here started: by hand, from another shell."""
        member, now = self._member(info.stage, info.worker), self._clock.now()
        is_new = member.num_starts == 0 and member.info is None
        member.info, member.heard_at, member.worked_at = info, now, now
        if member.num_starts == 0:
            member.by_hand, member.pid = True, info.pid
        self._is(member, "running", "")
        return is_new

    def heard(self, beat: Heartbeat) -> None:
        key = (beat.stage, beat.worker)
        if key not in self._members:
            return  # it says who it is before it can do anything
        member, now = self._members[key], self._clock.now()
        before, member.beat, member.heard_at = member.beat, beat, now
        if beat.doing == "working" or before is None or beat.busy_seconds > before.busy_seconds:
            member.worked_at = now

    def info(self, stage: str, worker: int) -> WorkerInfo | None:
        member = self._members.get((stage, worker))
        return member.info if member else None

    def num_restarts(self, stage: str, worker: int) -> int:
        member = self._members.get((stage, worker))
        return member.num_restarts if member else 0

    def infos(self) -> list[WorkerInfo]:
        return [member.info for member in self._members.values() if member.info is not None]

    def is_only_worker(self, stage: str, worker: int) -> bool:
        """Nobody else of its stage may hold records."""
        others = [m for m in self._members.values() if m.stage == stage and m.worker != worker]
        return all(member.phase == "left" for member in others)

    def is_awaited(self, stage: str, worker: int) -> bool:
        """It is neither ready nor gone for good."""
        member = self._member(stage, worker)
        return member.info is None and member.phase != "left"

    def silent_seconds(self, stage: str, worker: int) -> float:
        return self._clock.now() - self._member(stage, worker).heard_at

    def quiet_seconds(self) -> float:
        """Since anybody worked, started or ended."""
        return min((self._clock.now() - member.worked_at for member in self._members.values()), default=0.0)

    def worker_states(self) -> list[WorkerState]:
        """As the workers say it, of those that run."""
        running = (member for member in self._members.values() if member.phase in ("starting", "running"))
        return [worker_state(member.beat) for member in running if member.beat is not None]

    def all_run(self) -> bool:
        """Nobody is expected back who is away now."""
        there = [member for member in self._members.values() if member.phase != "left"]
        return all(m.phase == "running" and not is_silent(self._clock.now() - m.heard_at) for m in there)

    def states(self) -> list[ProcessState]:
        """By stage, in the order of the loop."""
        members = sorted(self._members.values(), key=lambda member: (_ORDER[member.stage], member.worker))
        return [self._state(member, members) for member in members]

    def gone_by_hand(self) -> list[str]:
        """Workers that were started by hand and are not heard of any more; each is told once."""
        gone = [m for m in self._members.values() if m.by_hand and m.phase != "left" and self._has_gone(m)]
        for member in gone:
            self.is_down(member.stage, member.worker, "left", "")
        return [f"{member.stage} {member.worker}" for member in gone]

    def _has_gone(self, member: _Member) -> bool:
        stopped = member.beat is not None and member.beat.doing == "stopped"
        return stopped or is_silent(self._clock.now() - member.heard_at)

    def _member(self, stage: str, worker: int) -> _Member:
        now = self._clock.now()
        fresh = _Member(stage, worker, None, "starting", "", now, now, now)
        return self._members.setdefault((stage, worker), fresh)

    def _is(self, member: _Member, phase: Phase, what: str) -> None:
        now = self._clock.now()
        member.phase, member.what, member.since = phase, what, now
        member.heard_at = member.worked_at = now

    def _state(self, member: _Member, members: list[_Member]) -> ProcessState:
        doing, what, since = self._doing(member)
        return ProcessState(
            stage=member.stage,
            worker=member.worker,
            pid=member.pid,
            doing=doing,
            what=what,
            since_seconds=since,
            busy_seconds=member.beat.busy_seconds if member.beat else 0.0,
            num_restarts=member.num_restarts,
            by_hand=member.by_hand,
            waits_for=_who_could_end(member, members) if doing == "waiting" else (),
        )

    def _doing(self, member: _Member) -> tuple[ProcessDoing, str, float]:
        now, beat = self._clock.now(), member.beat
        if member.phase in ("restarting", "held", "left"):
            return member.phase, member.what, now - member.since
        if is_silent(silence := now - member.heard_at):
            return "silent", "no heartbeat from it", silence
        if beat is None or beat.doing == "stopped":
            return "starting", member.what or "ends", now - member.since
        doing: ProcessDoing = "starting" if member.info is None else beat.doing
        return doing, beat.what, beat.since_seconds + now - member.heard_at


def worker_state(beat: Heartbeat) -> WorkerState:
    return WorkerState(
        stage=beat.stage,
        worker=beat.worker,
        doing=beat.doing,
        what=beat.what,
        since_seconds=beat.since_seconds,
        overdue_seconds=beat.overdue_seconds,
        busy_seconds=beat.busy_seconds,
        trouble=beat.trouble,
    )


def _who_could_end(member: _Member, members: list[_Member]) -> tuple[str, ...]:
    """Of the stages before it, those workers that do not wait themselves; where all wait, the stages."""
    before = BY_NAME[member.stage].unblocked_by
    busy = [
        f"{other.stage} {other.worker}"
        for other in members
        if other.stage in before
        and other.phase != "left"
        and not (other.phase == "running" and other.beat is not None and other.beat.doing == "waiting")
    ]
    there = {other.stage for other in members}
    return tuple(busy) or tuple(stage for stage in before if stage in there)

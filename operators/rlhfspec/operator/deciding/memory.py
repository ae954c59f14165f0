"""What the operator remembers of a job from one reconcile to the next: all of it in the job's status, so that an
operator that starts anew, or another one, goes on from there.

Example:
    >>> memory = Memory.of({"memory": {"number": 2, "state": "open", "prepared": True}})
    >>> memory.number, memory.prepared, memory.of_worker("reward-0").num_failures
    (2, True, 0)
    >>> memory.as_status()
    {'number': 2, 'state': 'open', 'prepared': True}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from rlhfspec.job.block import MOST_WORKERS
from rlhfspec.operator.deciding.times import maybe_time_of, text_of

RunState = Literal["open", "closing", "closed"]
_IN_STATUS = {"restart_not_before": "again"}
_IN_PYTHON = {written: name for name, written in _IN_STATUS.items()}


@dataclass(slots=True)
class WorkerMemory:
    """Of one worker, its failures since the last trained step. `pod`: the last one whose end was counted in;
    `restart_not_before`: it is not made again before then; `reason`, `message`: of that end."""

    counted: int = 0
    uncounted: int = 0
    disrupted: int = 0  # through no fault of the job's
    restarts: int = 0  # since the run began
    pod: str = ""
    restart_not_before: datetime | None = None
    reason: str = ""
    message: str = ""

    @property
    def num_failures(self) -> int:
        return self.counted + self.uncounted

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> WorkerMemory:
        kept = {_IN_PYTHON.get(name, name): value for name, value in status.items()}
        return cls(**kept | {"restart_not_before": maybe_time_of(kept.get("restart_not_before"))})

    def as_status(self) -> dict[str, Any]:
        kept = {_IN_STATUS.get(name, name): getattr(self, name) for name in self.__slots__}
        return _without_empty(kept | {"again": _text(self.restart_not_before)})


@dataclass(frozen=True, slots=True)
class JobOutcome:
    type: Literal["Succeeded", "Failed"]
    reason: str
    message: str


@dataclass(slots=True)
class Memory:
    """A run is open while its pods should run, closing while they are taken down, then closed: the next one opens, or
    the job is suspended."""

    number: int = 0  # of the run
    state: RunState = "closed"
    prepared: bool = False
    restart_id: str = ""  # restart.id when the run was opened
    opened: datetime | None = None
    running_since: datetime | None = None  # once all its pods were ready
    active_before: float = 0.0  # seconds that the runs before were open
    generators: int = 0  # that should run
    asked: int = 0  # roles.generator.workers, when the job was last reconciled
    rebalanced: bool = False  # the run has a rebalancer: control declared its subjects when it opened the run
    total: int = 0  # restarts
    counted: int = 0  # of them, by the failure policy
    step: int = 0  # the last one trained of which we heard
    workers: dict[str, WorkerMemory] = field(default_factory=dict)
    placed: dict[str, dict[str, Any]] = field(default_factory=dict)  # by role: where Kueue wants the run's pods
    started: datetime | None = None
    completed: datetime | None = None
    outcome: JobOutcome | None = None  # it stands in the conditions

    def of_worker(self, name: str) -> WorkerMemory:
        """`name`: as in role-number."""
        return self.workers.get(name) or WorkerMemory()

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> Memory:
        kept = dict(status.get("memory") or {})
        for name in _TIMES:
            kept[name] = maybe_time_of(kept.get(name))
        kept["state"] = kept.get("state", "closed") if kept.get("number") else "closed"
        kept["generators"] = min(kept.get("generators", 0), MOST_WORKERS)  # what may write a status could say any
        kept["workers"] = {name: WorkerMemory.of(worker) for name, worker in (kept.get("workers") or {}).items()}
        known = {name: value for name, value in kept.items() if name in cls.__slots__}  # another version's has more
        return cls(**known, outcome=_outcome_of(status))

    def as_status(self) -> dict[str, Any]:
        """The status's `memory`."""
        kept = {name: getattr(self, name) for name in self.__slots__ if name != "outcome"}
        kept |= {name: _text(kept[name]) for name in _TIMES}
        kept["active_before"] = round(self.active_before, 3)
        kept["workers"] = {name: worker.as_status() for name, worker in sorted(self.workers.items())}
        return _without_empty(kept)


_TIMES = ("opened", "running_since", "started", "completed")


def _outcome_of(status: Mapping[str, Any]) -> JobOutcome | None:
    for condition in status.get("conditions") or ():
        if condition["type"] in ("Succeeded", "Failed") and condition["status"] == "True":
            return JobOutcome(condition["type"], condition["reason"], condition["message"])
    return None


def _text(time: datetime | None) -> str | None:
    return text_of(time) if time else None


def _without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def tidy(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A status in one form: server-side apply leaves null, or nothing, where a map or list became empty.

    >>> tidy({"byWorker": None, "memory": {"workers": {}}, "step": 0, "reason": ""})
    {'step': 0, 'reason': ''}
    """
    kept = {name: tidy(value) if isinstance(value, Mapping) else value for name, value in fields.items()}
    return {name: value for name, value in kept.items() if value is not None and value != {} and value != []}

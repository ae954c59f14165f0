"""The operator's memory of a job, kept in the job's status.

Example:
    >>> memory = Memory.of({"internal": {"number": 2, "state": "open", "prepared": True}})
    >>> memory.number, memory.prepared, memory.of_worker("reward-0").num_failures
    (2, True, 0)
    >>> memory.as_internal()
    {'number': 2, 'state': 'open', 'prepared': True}
    >>> text_of(datetime.fromisoformat("2026-01-02T03:04:05.250000Z"))
    '2026-01-02T03:04:05.250Z'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from rlhfspec.job.block import MOST_WORKERS

RunState = Literal["open", "closing", "closed"]
INTERNAL = "internal"  # private status field


def uids_made(status: Mapping[str, Any]) -> set[str]:
    """Return the pod uids that a status records as made by the operator."""
    internal = status.get(INTERNAL)
    made = internal.get("made") if isinstance(internal, dict) else None
    return set(map(str, made.values())) if isinstance(made, dict) else set()


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Failures of one worker, and its last counted end."""

    counted: int = 0  # by the failure policy; this and the next two since the last trained step
    uncounted: int = 0
    disrupted: int = 0  # not the job's fault
    restarts: int = 0  # since the run began
    pod: str = ""
    not_before: datetime | None = None
    reason: str = ""
    message: str = ""

    @property
    def num_failures(self) -> int:
        return self.counted + self.uncounted


_NEW_WORKER = WorkerMemory()


@dataclass(frozen=True, slots=True)
class JobOutcome:
    type: Literal["Succeeded", "Failed"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a job. Its run is open, closing (its pods are being removed) or closed."""

    number: int = 0  # number of the run
    generation: int = 0  # of the job when the run opened
    state: RunState = "closed"
    prepared: bool = False
    opened: datetime | None = None
    running_since: datetime | None = None  # when all pods were first ready
    active_before: float = 0.0  # seconds that earlier runs were open
    generators: int = 0  # wanted number
    asked: int = 0  # roles.generator.workers at the last reconcile
    rebalanced: bool = False  # control declared the rebalancer's subjects when it opened the run
    step: int = 0  # last trained step reported
    workers: Mapping[str, WorkerMemory] = field(default_factory=dict)
    placed: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # by role: placement by Kueue
    made: Mapping[str, str] = field(default_factory=dict)  # by worker: uid of the pod that the operator made last
    # The following are public fields of the status.
    restart_id: str = ""  # restart.id at the start of the run
    total: int = 0  # restarts
    counted: int = 0  # restarts that the failure policy counted
    started: datetime | None = None
    completed: datetime | None = None
    outcome: JobOutcome | None = None

    def of_worker(self, name: str) -> WorkerMemory:
        return self.workers.get(name, _NEW_WORKER)

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> Memory:
        given = dict(status.get(INTERNAL) or {})
        kept = {name: given[name] for name in _INTERNAL if name in given}  # other versions may have more fields
        kept |= {name: maybe_time_of(kept.get(name)) for name in ("opened", "running_since")}
        kept["state"] = kept.get("state", "closed") if kept.get("number") else "closed"
        kept["generators"] = min(kept.get("generators", 0), MOST_WORKERS)  # a bound, since the status is writable
        kept["workers"] = {name: _worker_of(worker) for name, worker in (kept.get("workers") or {}).items()}
        restarts = status.get("restarts") or {}
        return cls(
            **kept,
            restart_id=(status.get("run") or {}).get("restartId", ""),
            total=restarts.get("total", 0),
            counted=restarts.get("counted", 0),
            started=maybe_time_of(status.get("startTime")),
            completed=maybe_time_of(status.get("completionTime")),
            outcome=_outcome_of(status),
        )

    def as_internal(self) -> dict[str, Any]:
        kept = _written(self, _INTERNAL) | {"active_before": round(self.active_before, 3)}
        kept["workers"] = {
            name: _written(worker, WorkerMemory.__slots__) for name, worker in sorted(self.workers.items())
        }
        return _without_empty(kept)


_INTERNAL = Memory.__slots__[: Memory.__slots__.index("restart_id")]


def _worker_of(status: Mapping[str, Any]) -> WorkerMemory:
    return WorkerMemory(**{**status, "not_before": maybe_time_of(status.get("not_before"))})


def _outcome_of(status: Mapping[str, Any]) -> JobOutcome | None:
    for condition in status.get("conditions") or ():
        if condition["type"] in ("Succeeded", "Failed") and condition["status"] == "True":
            return JobOutcome(condition["type"], condition["reason"], condition["message"])
    return None


def _written(memory: Memory | WorkerMemory, fields: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(memory, name) for name in fields}
    return _without_empty({n: text_of(each) if isinstance(each, datetime) else each for n, each in values.items()})


def _without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def tidy(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a status without nulls and empty containers, which server-side apply produces inconsistently.

    >>> tidy({"byWorker": None, "internal": {"workers": {}}, "step": 0, "reason": ""})
    {'step': 0, 'reason': ''}
    """
    kept = {name: tidy(value) if isinstance(value, Mapping) else value for name, value in fields.items()}
    return {name: value for name, value in kept.items() if value is not None and value != {} and value != []}


def maybe_time_of(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text).astimezone(UTC) if text else None


def text_of(time: datetime) -> str:
    """Return a Kubernetes timestamp, to the millisecond."""
    precision = "milliseconds" if time.microsecond >= 1000 else "seconds"
    return time.astimezone(UTC).isoformat(timespec=precision).removesuffix("+00:00") + "Z"

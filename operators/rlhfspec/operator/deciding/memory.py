"""What the operator remembers of a job from one reconcile to the next. All of it stands in the job's status, so that a
new replica continues from there: what is of use to others in fields of its own, the rest under `status.internal`.

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
INTERNAL = "internal"  # field of the status that is the operator's own


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """What is remembered of one worker. `pod`: the uid of the last pod whose end was counted, with its `reason` and
    `message`; `not_before`: when the worker may be made again."""

    counted: int = 0  # by the failure policy, since the last trained step; so are the next two
    uncounted: int = 0
    disrupted: int = 0  # through no fault of the job's
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
    """A run is open while its pods should run, closing while they are taken down, then closed: the next one opens, or
    the job is suspended."""

    number: int = 0  # of the run
    state: RunState = "closed"
    prepared: bool = False
    opened: datetime | None = None
    running_since: datetime | None = None  # once all its pods were ready
    active_before: float = 0.0  # seconds that the runs before were open
    generators: int = 0  # that should run
    asked: int = 0  # roles.generator.workers, when the job was last reconciled
    rebalanced: bool = False  # the run has a rebalancer: control declared its subjects when it opened the run
    step: int = 0  # the last one trained of which we heard
    workers: Mapping[str, WorkerMemory] = field(default_factory=dict)
    placed: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # by role: where Kueue wants the run's pods
    # In public fields of the status.
    restart_id: str = ""  # restart.id when the run was opened
    total: int = 0  # restarts
    counted: int = 0  # of them, by the failure policy
    started: datetime | None = None
    completed: datetime | None = None
    outcome: JobOutcome | None = None

    def of_worker(self, name: str) -> WorkerMemory:
        """Return what is remembered of a worker, such as `reward-0`."""
        return self.workers.get(name, _NEW_WORKER)

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> Memory:
        given = dict(status.get(INTERNAL) or {})
        kept = {name: given[name] for name in _INTERNAL if name in given}  # another version's has more
        kept |= {name: maybe_time_of(kept.get(name)) for name in ("opened", "running_since")}
        kept["state"] = kept.get("state", "closed") if kept.get("number") else "closed"
        kept["generators"] = min(kept.get("generators", 0), MOST_WORKERS)  # what may write a status could say any
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
        """Return the status's `internal`."""
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
    """Return a status in one form: server-side apply leaves null, or nothing, where a map or list became empty.

    >>> tidy({"byWorker": None, "internal": {"workers": {}}, "step": 0, "reason": ""})
    {'step': 0, 'reason': ''}
    """
    kept = {name: tidy(value) if isinstance(value, Mapping) else value for name, value in fields.items()}
    return {name: value for name, value in kept.items() if value is not None and value != {} and value != []}


def maybe_time_of(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text).astimezone(UTC) if text else None


def text_of(time: datetime) -> str:
    """Return a time as Kubernetes writes it, to the millisecond."""
    precision = "milliseconds" if time.microsecond >= 1000 else "seconds"
    return time.astimezone(UTC).isoformat(timespec=precision).removesuffix("+00:00") + "Z"

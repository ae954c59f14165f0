"""Observed state of a job: its manifest, pods, report and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from rlhfspec.cluster.report import Report
from rlhfspec.errors import Problem
from rlhfspec.job import RLHFJob
from rlhfspec.operator.making.workloads import Queueing

Worker = tuple[str, int]  # role, number


def worker_name(key: Worker) -> str:
    """Return a worker's name, ROLE-NUMBER.

    >>> worker_name(("generator", 2))
    'generator-2'
    """
    return f"{key[0]}-{key[1]}"


def worker_of(name: str) -> Worker:
    """Return the role and number in a worker's name.

    >>> worker_of("generator-2"), worker_of("nonsense")
    (('generator', 2), ('', 0))
    """
    role, _, number = name.rpartition("-")
    return (role, int(number)) if number.isdecimal() else ("", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str
    created: datetime
    deleting_since: datetime | None = None
    leaves_orphans: bool = False  # it is being deleted with orphaned dependents
    manifest: Mapping[str, Any]  # without status and server fields
    status: Mapping[str, Any] = field(default_factory=dict)
    job: RLHFJob | None = None  # None: invalid
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Terminated:
    """End of a container; `message` is one line."""

    exit_code: int
    reason: str = ""  # such as OOMKilled, Error, Completed
    message: str = ""
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """One-word reason with its evidence."""

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    name: str
    uid: str
    role: str
    worker: int
    run: str  # run uid
    owner: str = ""  # uid of the controlling job
    proof: str = ""  # shows that the operator made it
    restart_id: str = ""
    url: str = ""  # of a gateway, for clients
    phase: Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"] = "Pending"  # of the worker container
    lingers: bool = False  # the worker ended, but a sidecar did not
    ready: bool = False
    ready_changed: datetime | None = None  # last change of readiness
    node: str | None = None
    created: datetime
    gone_by: datetime | None = None  # end of the grace period of its deletion
    grace_seconds: float = 0.0  # grace period of its deletion
    why: Said | None = None  # reason of the whole pod: Evicted, NodeLost, UnexpectedAdmissionError ...
    unscheduled: Said | None = None  # the scheduler's reason
    waiting: Said | None = None  # reason of the container: ImagePullBackOff, CreateContainerConfigError ...
    terminated: Terminated | None = None
    has_sandbox: bool = False  # volumes are mounted and it has an address
    disruption: Said | None = None  # disruption from outside: EvictionByEvictionAPI ...
    warnings: tuple[Said, ...] = ()  # its events, oldest first

    @property
    def key(self) -> Worker:
        return self.role, self.worker

    @property
    def is_finished(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def is_deleting(self) -> bool:
        return self.gone_by is not None

    @property
    def is_running(self) -> bool:
        return not self.is_finished


@dataclass(frozen=True, slots=True)
class Refusal:
    """Rejection of an object by the API server, forgotten once the object is accepted."""

    kind: str
    name: str
    reason: str  # of the Status: Forbidden, Invalid, InternalError ...
    message: str
    at: datetime


@dataclass(frozen=True, slots=True)
class DryRunResult:
    """Result of a dry run; an empty `problem` means success."""

    generation: int
    problem: str = ""
    again_at: datetime | None = None  # retry of a problem that may vanish without an edit of the job


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    pods: tuple[PodView, ...] = ()
    report: Report | None = None  # the last one from control
    report_at: datetime | None = None
    listening_since: datetime | None = None  # earlier reports went to another replica
    refusals: tuple[Refusal, ...] = ()
    trial: DryRunResult | None = None  # the last one
    broker: Said | None = None  # why NATS or Redis is unreachable; None: no known problem
    queueing: Queueing = field(default_factory=Queueing)

"""What the operator knows when it reconciles a job: the job, its pods, its report, and what was refused. All of it as
the watches have it, so possibly some moments old; `views` makes these from the API server's objects.

Example:
    >>> from datetime import UTC, datetime
    >>> pod = PodView(name="sums-reward-0", uid="7", role="reward", worker=0, run="3a9d", created=datetime.now(UTC))
    >>> pod.key, pod.is_finished, pod.is_deleting
    (('reward', 0), False, False)
"""

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
    """
    >>> worker_name(("generator", 2))
    'generator-2'
    """
    return f"{key[0]}-{key[1]}"


def worker_of(name: str) -> Worker:
    """
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
    leaves_orphans: bool = False  # it is being deleted, and what it owns is to stay
    manifest: Mapping[str, Any]  # as a user would write it: without status and what only the server writes
    status: Mapping[str, Any] = field(default_factory=dict)
    job: RLHFJob | None = None  # None: it has problems
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Terminated:
    """How a container ended. `message`: the last line the process said, or what the kubelet says."""

    exit_code: int
    reason: str = ""  # such as OOMKilled, Error, Completed
    message: str = ""
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """A reason in one word and its evidence."""

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    name: str
    uid: str
    role: str
    worker: int
    run: str  # its uid
    owner: str = ""  # uid of the job that it belongs to, as its metadata says
    restart_id: str = ""
    phase: Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"] = "Pending"  # of its worker
    lingers: bool = False  # its worker ended, and other containers of the pod did not
    ready: bool = False
    ready_changed: datetime | None = None  # when it became so, or ceased to be
    node: str | None = None
    created: datetime
    gone_by: datetime | None = None  # it is being deleted, and its grace ends then
    grace_seconds: float = 0.0  # with which it is
    why: Said | None = None  # of the pod as a whole: Evicted, NodeLost, UnexpectedAdmissionError ...
    unscheduled: Said | None = None  # what the scheduler says of a pod that it found no node for
    waiting: Said | None = None  # why its container does not run: ImagePullBackOff, CreateContainerConfigError ...
    terminated: Terminated | None = None
    has_sandbox: bool = False  # its volumes are mounted and it has an address: containers may start
    disruption: Said | None = None  # it goes, or went, through no fault of its own: EvictionByEvictionAPI ...
    warnings: tuple[Said, ...] = ()  # the events on it, oldest first

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
        """It runs, or may still."""
        return not self.is_finished


@dataclass(frozen=True, slots=True)
class Refusal:
    """Of something we applied, by the API server or a webhook; forgotten once the same was accepted."""

    kind: str
    name: str
    reason: str  # of the API server's Status: Forbidden, Invalid, InternalError ...
    message: str
    at: datetime


@dataclass(frozen=True, slots=True)
class DryRunResult:
    """What the API server says of the job's pods without making them. `problem`: empty: it would take them."""

    generation: int
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    pods: tuple[PodView, ...] = ()
    report: Report | None = None  # the last one of the job's control
    report_at: datetime | None = None
    listening_since: datetime | None = None  # reports of the time before went to another replica
    refusals: tuple[Refusal, ...] = ()
    trial: DryRunResult | None = None  # the last one
    broker: Said | None = None  # why NATS or Redis cannot be reached; None: nothing speaks against it
    queueing: Queueing = field(default_factory=Queueing)

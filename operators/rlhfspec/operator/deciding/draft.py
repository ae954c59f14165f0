"""What one reconcile of a job decides (`ReconcilePlan`), and the same in the making (`Draft`): what is known, what is
remembered, and what has been decided so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Literal

from rlhfspec.cluster import names
from rlhfspec.cluster.report import Report
from rlhfspec.job import Spec
from rlhfspec.operator.deciding.memory import JobOutcome, Memory, WorkerMemory
from rlhfspec.operator.deciding.observed import ChartSettings, JobView, Observed, PodView, Worker

LOST_SECONDS = 15.0  # past the end of its grace: a kubelet that answers would have removed the pod
FRESH_SECONDS = 60.0  # so long a report is believed; control says something every 20 s
MOST_AT_ONCE = 50  # pods that one reconcile makes, and that it deletes: a job of thousands holds up no other
REFUSED_SECONDS = 5.0  # before something that was refused is tried again


@dataclass(frozen=True, slots=True)
class Delete:
    """`grace_seconds`: None: the object's own; 0: at once, without asking its node. `uid`: a precondition, so that
    nothing made since is hit. An object that is not there any more, or another by now, is no error."""

    kind: Literal["Pod", "RLHFJob"]
    name: str
    grace_seconds: int | None
    uid: str


@dataclass(frozen=True, slots=True)
class WorkloadWrite:
    """To Kueue's Workload of the job. `body`: what is created, or a patch of its status that names the version it is
    of; where somebody wrote since, the next reconcile writes again."""

    verb: Literal["create", "delete", "status"]
    name: str
    uid: str = ""
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcilePlan:
    """To be carried out in this order: the status is written, then what is tried is tried, then deleted, created. The
    status is the memory of what was decided: where it cannot be written (somebody wrote since: a conflict on the
    resourceVersion that was read), nothing else is done, and the job is reconciled again. What carries it out may fail
    anywhere in between: the next reconcile decides again, from what is there then.

    >>> ReconcilePlan(status={"phase": "Pending"}).is_quiet
    True
    >>> ReconcilePlan(status={}, create=({"kind": "Pod"},)).is_quiet
    False
    """

    status: dict[str, Any]
    trial: tuple[dict[str, Any], ...] = ()  # pods that the API server is asked about, and does not make
    create: tuple[dict[str, Any], ...] = ()  # in this order
    delete: tuple[Delete, ...] = ()
    workload: WorkloadWrite | None = None
    events: tuple[Event, ...] = ()
    requeue_seconds: float | None = None  # reconcile again then, even if nothing happens

    @property
    def is_quiet(self) -> bool:
        """Nothing to do but perhaps to write the status."""
        return not (self.trial or self.create or self.delete or self.workload)


@dataclass
class Draft:
    """Its methods say what is; what follows from it is decided in `reconcile`'s parts."""

    job: JobView
    observed: Observed
    settings: ChartSettings
    now: datetime
    memory: Memory
    trial: list[dict[str, Any]] = field(default_factory=list)
    create: list[dict[str, Any]] = field(default_factory=list)
    delete: list[Delete] = field(default_factory=list)
    workload: WorkloadWrite | None = None
    requeue: float | None = None
    wanted: dict[tuple[int, bool], list[Worker]] = field(default_factory=dict)  # what `wanted_workers` found

    @property
    def spec(self) -> Spec:
        assert self.job.job is not None
        return self.job.job.spec

    @property
    def never_ran(self) -> bool:
        """It failed before it began, by what its manifest says."""
        outcome = self.memory.outcome
        return self.memory.number == 0 and outcome is not None and outcome.reason == "BadConfig"

    @property
    def run_uid(self) -> str:
        return names.run_uid(self.job.uid, self.memory.number)

    @property
    def pods(self) -> tuple[PodView, ...]:
        return self.observed.pods

    @cached_property
    def by_key(self) -> dict[Worker, PodView]:
        return {pod.key: pod for pod in self.pods}

    @property
    def report(self) -> Report | None:
        """The last one, if it is of this run."""
        report = self.observed.report
        return report if report is not None and report.run == self.run_uid and self.memory.state == "open" else None

    @property
    def fresh_report(self) -> Report | None:
        at = self.observed.report_at
        return self.report if at is not None and self.seconds_since(at) < FRESH_SECONDS else None

    def seconds_since(self, time: datetime) -> float:
        return (self.now - time).total_seconds()

    def is_lost(self, pod: PodView) -> bool:
        """Asked to end, and its node does not answer."""
        return pod.gone_by is not None and self.seconds_since(pod.gone_by) >= LOST_SECONDS

    def is_refused(self, kind: str, name: str) -> bool:
        """So lately that it need not be tried again yet."""
        for refusal in self.observed.refusals:
            left = REFUSED_SECONDS - self.seconds_since(refusal.at)
            if (refusal.kind, refusal.name) == (kind, name) and left > 0:
                self.requeue_in(left)
                return True
        return False

    def worker_memory(self, key: Worker) -> WorkerMemory:
        """To be written in."""
        return self.memory.workers.setdefault(worker_name(key), WorkerMemory())

    # --- what is decided -------------------------------------------------------------------------------------------

    def end(self, type_: str, reason: str, message: str) -> None:
        """The first outcome stays."""
        if self.memory.outcome is None:
            self.memory.outcome = JobOutcome(type_, reason, message)  # type: ignore[arg-type]
            self.memory.completed = self.now

    def remove(self, pod: PodView, grace_seconds: int | None = None) -> None:
        """None: the pod's own grace. One that is being deleted is only watched, to notice that its node is lost."""
        if len(self.delete) == MOST_AT_ONCE:
            return self.requeue_in(0.0)
        if pod.gone_by is None:
            return self.delete.append(Delete("Pod", pod.name, grace_seconds, pod.uid))
        lost_at = pod.gone_by + timedelta(seconds=LOST_SECONDS)
        if lost_at > self.now:
            self.requeue_in((lost_at - self.now).total_seconds())
        elif pod.role != "trainer":  # whose folder has a lock: two must never write it
            self.delete.append(Delete("Pod", pod.name, 0, pod.uid))
        return None

    def requeue_in(self, seconds: float) -> None:
        seconds = max(seconds, 0.05)
        self.requeue = seconds if self.requeue is None else min(self.requeue, seconds)

    def requeue_at(self, time: datetime) -> None:
        self.requeue_in((time - self.now).total_seconds())


def worker_name(key: Worker) -> str:
    """
    >>> worker_name(("generator", 2))
    'generator-2'
    """
    return f"{key[0]}-{key[1]}"

"""Immutable input (`Situation`) and output (`Actions`) of a decision about one job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from itertools import chain
from pathlib import PurePosixPath
from typing import Any, Literal, Self

from rlhfspec.cluster import names
from rlhfspec.cluster.report import Report
from rlhfspec.job import RLHFJob, Spec
from rlhfspec.messages.loop import GATEWAY, workers_of
from rlhfspec.operator.deciding.memory import JobOutcome, Memory, WorkerMemory
from rlhfspec.operator.deciding.observed import JobView, Observed, PodView, Worker, worker_name
from rlhfspec.operator.settings import ChartSettings

LOST_SECONDS = 15.0  # after a pod's grace period, in which a live kubelet removes it
FRESH_SECONDS = 60.0  # validity of a report; control sends one every 20 s
MOST_AT_ONCE = 50  # pods created, and pods deleted, per reconcile, so that a huge job does not delay others
REFUSED_SECONDS = 5.0  # before a refused object is tried again
_LEAST_REQUEUE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletion of the object with this `uid`; `grace_seconds` None keeps the object's own grace period."""

    kind: Literal["Pod", "RLHFJob"]
    name: str
    grace_seconds: int | None
    uid: str


@dataclass(frozen=True, slots=True)
class NamedObject:
    """Object in the job's namespace that the job's `field` names."""

    kind: str
    name: str
    field: str


@dataclass(frozen=True, slots=True)
class WorkloadWrite:
    """Write to the job's Workload; `body` is the object or a status patch."""

    verb: Literal["create", "delete", "status"]
    name: str
    uid: str = ""
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Actions:
    """Actions for a job, carried out in the order of the fields.

    >>> both = Actions(requeue_seconds=3.0) + requeued(1.0)
    >>> both.requeue_seconds, both.is_quiet
    (1.0, True)
    """

    references: tuple[NamedObject, ...] = ()  # objects whose label is checked
    trial: tuple[dict[str, Any], ...] = ()  # pods of a dry run
    delete: tuple[Delete, ...] = ()
    create: tuple[dict[str, Any], ...] = ()
    workload: WorkloadWrite | None = None
    requeue_seconds: float | None = None  # reconcile then at the latest

    @classmethod
    def merged(cls, parts: Iterable[Actions]) -> Self:
        parts = [each for each in parts if each is not NOTHING]
        return cls(
            references=tuple(chain.from_iterable(each.references for each in parts)),
            trial=tuple(chain.from_iterable(each.trial for each in parts)),
            delete=tuple(chain.from_iterable(each.delete for each in parts)),
            create=tuple(chain.from_iterable(each.create for each in parts)),
            workload=next((each.workload for each in parts if each.workload), None),
            requeue_seconds=min((s for each in parts if (s := each.requeue_seconds) is not None), default=None),
        )

    def __add__(self, other: Actions) -> Actions:
        return Actions.merged((self, other))

    @property
    def is_quiet(self) -> bool:
        """Return whether at most the status is to be written."""
        return not (self.references or self.trial or self.create or self.delete or self.workload)


@dataclass(frozen=True, kw_only=True)
class ReconcilePlan(Actions):
    """Result of one reconcile, whose actions are carried out after the status was written."""

    status: dict[str, Any]
    events: tuple[Event, ...] = ()


NOTHING = Actions()


def requeued(seconds: float) -> Actions:
    return Actions(requeue_seconds=max(seconds, _LEAST_REQUEUE_SECONDS))


@dataclass(frozen=True)
class Situation:
    """Everything known about a job in one reconcile; decisions return a copy with another `memory`."""

    job: JobView
    observed: Observed
    settings: ChartSettings
    now: datetime
    memory: Memory

    def remembering(self, **changes: Any) -> Situation:
        return replace(self, memory=replace(self.memory, **changes))

    def remembering_worker(self, name: str, worker: WorkerMemory, **changes: Any) -> Situation:
        return self.remembering(workers={**self.memory.workers, name: worker}, **changes)

    def ended(self, type_: Literal["Succeeded", "Failed"], reason: str, message: str) -> Situation:
        """Return the situation with this outcome, or unchanged if it has one."""
        if self.memory.outcome is not None:
            return self
        return self.remembering(outcome=JobOutcome(type_, reason, message), completed=self.now)

    @property
    def spec(self) -> Spec:
        assert self.job.job is not None
        return self.job.job.spec

    @property
    def never_ran(self) -> bool:
        """Return whether the spec was refused before the first run."""
        outcome = self.memory.outcome
        return self.memory.number == 0 and outcome is not None and outcome.reason == "BadConfig"

    @property
    def run_uid(self) -> str:
        return names.run_uid(self.job.uid, self.memory.number)

    @property
    def run_folder(self) -> PurePosixPath:
        written = self.spec.storage.run_folder
        return names.STORAGE / written if written else names.run_folder(self.job.name, self.job.uid)

    @cached_property
    def pods(self) -> tuple[PodView, ...]:
        """Return the pods that the operator made."""
        return tuple(pod for pod in self.observed.pods if self.is_made(pod))

    def is_made(self, pod: PodView) -> bool:
        """Return whether the operator made this pod, judged by its recorded uid or its proof."""
        worker = worker_name(pod.key)
        return pod.uid == self.memory.made.get(worker) or pod.proof == self.proof_of(worker)

    def proof_of(self, worker: str) -> str:
        return self.settings.proof(self.run_uid, worker, self.memory.made.get(worker, ""))

    @cached_property
    def by_key(self) -> dict[Worker, PodView]:
        return {pod.key: pod for pod in self.pods}

    @cached_property
    def wanted(self) -> list[Worker]:
        """Return the workers whose pods should exist now."""
        memory = self.memory
        if memory.outcome is not None or memory.state != "open" or self.job.job is None:
            return []
        if not memory.prepared:
            return [(names.PREPARE, 0)]
        return [(role, worker) for role, count in self.num_workers().items() for worker in range(count)]

    @cached_property
    def names_of_gateway(self) -> frozenset[str]:
        """Return the names of objects that only the gateway needs."""
        job, uid = self.job.name, self.job.uid
        secrets = (names.secret_name(job, role, uid) for role in (GATEWAY.name, names.CLIENTS))
        return frozenset((names.pod_name(job, GATEWAY.name, 0), names.gateway_name(job, uid), *secrets))

    def without_gateway(self) -> Situation:
        """Return the situation without its evidence about the gateway."""
        pods = tuple(pod for pod in self.observed.pods if pod.role != GATEWAY.name)
        refusals = tuple(refusal for refusal in self.observed.refusals if refusal.name not in self.names_of_gateway)
        known = replace(self, observed=replace(self.observed, pods=pods, refusals=refusals))
        return known.remembering_worker(worker_name((GATEWAY.name, 0)), WorkerMemory())

    def num_workers(self) -> dict[str, int]:
        """Return the number of workers per role."""
        assert self.job.job is not None
        counts = {names.CONTROL: 1} | pods_of(self.job.job) | {"generator": self.memory.generators}
        counts.pop("rebalancer", None)
        return counts | ({"rebalancer": 1} if self.memory.rebalanced else {})

    @property
    def report(self) -> Report | None:
        """Return the last report if it is about the open run, else None."""
        report = self.observed.report
        return report if report is not None and report.run == self.run_uid and self.memory.state == "open" else None

    @property
    def fresh_report(self) -> Report | None:
        at = self.observed.report_at
        return self.report if at is not None and self.seconds_since(at) < FRESH_SECONDS else None

    def seconds_since(self, time: datetime) -> float:
        return (self.now - time).total_seconds()

    def is_lost(self, pod: PodView) -> bool:
        """Return whether a deleted pod exceeded its grace period by LOST_SECONDS."""
        return pod.gone_by is not None and self.seconds_since(pod.gone_by) >= LOST_SECONDS

    def refused_seconds(self, kind: str, name: str) -> float:
        """Return the seconds until a refused object may be retried, 0 for others."""
        for refusal in self.observed.refusals:
            if (refusal.kind, refusal.name) == (kind, name):
                return max(REFUSED_SECONDS - self.seconds_since(refusal.at), 0.0)
        return 0.0

    def requeued_at(self, time: datetime) -> Actions:
        return requeued((time - self.now).total_seconds())

    def removal_of(self, pod: PodView, grace_seconds: int | None = None) -> Actions:
        """Return the actions that delete a pod, by force once it is lost, except a trainer's."""
        if pod.gone_by is None:
            return Actions(delete=(Delete("Pod", pod.name, grace_seconds, pod.uid),))
        lost_at = pod.gone_by + timedelta(seconds=LOST_SECONDS)
        if lost_at > self.now:
            return self.requeued_at(lost_at)
        if pod.role == "trainer":  # never by force: two trainers must not write one run folder
            return NOTHING
        return Actions(delete=(Delete("Pod", pod.name, 0, pod.uid),))


def pods_of(job: RLHFJob) -> dict[str, int]:
    """Return the number of pods per stage; the trainer has one per node."""
    roles = job.spec.roles
    return workers_of(job, is_served=roles.gateway.workers > 0) | {"trainer": roles.trainer.nodes}

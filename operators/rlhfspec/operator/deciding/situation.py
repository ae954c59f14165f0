"""All that is known of one job while it is reconciled (`Situation`), and what is to be done about it (`Actions`).

Both are immutable: a deciding function returns a new situation or actions, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from itertools import chain
from typing import Any, Literal, Self

from rlhfspec.cluster import names
from rlhfspec.cluster.report import Report
from rlhfspec.job import RLHFJob, Spec
from rlhfspec.messages.loop import workers_of
from rlhfspec.operator.deciding.memory import JobOutcome, Memory, WorkerMemory
from rlhfspec.operator.deciding.observed import JobView, Observed, PodView, Worker
from rlhfspec.operator.settings import ChartSettings

LOST_SECONDS = 15.0  # past the end of its grace: a kubelet that answers would have removed the pod
FRESH_SECONDS = 60.0  # a report is believed for so long; control sends one every 20 s
MOST_AT_ONCE = 50  # pods that one reconcile makes, and that it deletes: a job of thousands holds up no other
REFUSED_SECONDS = 5.0  # before something that was refused is tried again
_LEAST_REQUEUE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Delete:
    """`grace_seconds`: None: the object's own; 0: at once, without asking its node. `uid`: a precondition, so that no
    newer object of the name is deleted. A missing or newer object is no error."""

    kind: Literal["Pod", "RLHFJob"]
    name: str
    grace_seconds: int | None
    uid: str


@dataclass(frozen=True, slots=True)
class WorkloadWrite:
    """A write to Kueue's Workload of the job. `body`: the object to create, or a patch of its status that names the
    version it was made for; after a conflict the next reconcile writes again."""

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
    """What is to be done about a job, in the order of the fields.

    >>> both = Actions(requeue_seconds=3.0) + requeued(1.0)
    >>> both.requeue_seconds, both.is_quiet
    (1.0, True)
    """

    trial: tuple[dict[str, Any], ...] = ()  # pods that the API server is asked about, and does not make
    delete: tuple[Delete, ...] = ()
    create: tuple[dict[str, Any], ...] = ()
    workload: WorkloadWrite | None = None
    requeue_seconds: float | None = None  # reconcile again then, even if nothing happens

    @classmethod
    def merged(cls, parts: Iterable[Actions]) -> Self:
        parts = [each for each in parts if each is not NOTHING]
        return cls(
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
        """Return whether nothing is to be done, but perhaps a status to be written."""
        return not (self.trial or self.create or self.delete or self.workload)


@dataclass(frozen=True, kw_only=True)
class ReconcilePlan(Actions):
    """The result of one reconcile: a status, which is written first, and then actions.

    The status remembers what was decided. Where it cannot be written (a conflict on the resourceVersion that was read)
    nothing else is done, and the job is reconciled again. Any action may fail: the next reconcile decides anew.
    """

    status: dict[str, Any]
    events: tuple[Event, ...] = ()


NOTHING = Actions()


def requeued(seconds: float) -> Actions:
    return Actions(requeue_seconds=max(seconds, _LEAST_REQUEUE_SECONDS))


@dataclass(frozen=True)
class Situation:
    """`memory`: what the operator remembers; a decision that has to be remembered returns a situation with another."""

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
        """Return the situation with this outcome, unless there is one: the first stays."""
        if self.memory.outcome is not None:
            return self
        return self.remembering(outcome=JobOutcome(type_, reason, message), completed=self.now)

    @property
    def spec(self) -> Spec:
        assert self.job.job is not None
        return self.job.job.spec

    @property
    def never_ran(self) -> bool:
        """Return whether the job failed before its first run, by what its manifest says."""
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

    @cached_property
    def wanted(self) -> list[Worker]:
        """The workers whose pods should exist now, in the order of the loop."""
        memory = self.memory
        if memory.outcome is not None or memory.state != "open" or self.job.job is None:
            return []
        if not memory.prepared:
            return [(names.PREPARE, 0)]
        return [(role, worker) for role, count in self.num_workers().items() for worker in range(count)]

    def num_workers(self) -> dict[str, int]:
        """Return the number of workers of every role that has pods while the run is open and prepared."""
        assert self.job.job is not None
        counts = {names.CONTROL: 1} | pods_of(self.job.job) | {"generator": self.memory.generators}
        counts.pop("rebalancer", None)
        return counts | ({"rebalancer": 1} if self.memory.rebalanced else {})

    @property
    def report(self) -> Report | None:
        """The last report, if it is of this run."""
        report = self.observed.report
        return report if report is not None and report.run == self.run_uid and self.memory.state == "open" else None

    @property
    def fresh_report(self) -> Report | None:
        at = self.observed.report_at
        return self.report if at is not None and self.seconds_since(at) < FRESH_SECONDS else None

    def seconds_since(self, time: datetime) -> float:
        return (self.now - time).total_seconds()

    def is_lost(self, pod: PodView) -> bool:
        """Return whether the pod was asked to end and its node does not answer."""
        return pod.gone_by is not None and self.seconds_since(pod.gone_by) >= LOST_SECONDS

    def refused_seconds(self, kind: str, name: str) -> float:
        """Return how long the object, which was refused, is not tried again; 0: it may be tried now."""
        for refusal in self.observed.refusals:
            if (refusal.kind, refusal.name) == (kind, name):
                return max(REFUSED_SECONDS - self.seconds_since(refusal.at), 0.0)
        return 0.0

    def requeued_at(self, time: datetime) -> Actions:
        return requeued((time - self.now).total_seconds())

    def removal_of(self, pod: PodView, grace_seconds: int | None = None) -> Actions:
        """Return how a pod is removed. `grace_seconds`: None: the pod's own. A pod that is being deleted already is
        only watched, to notice that its node is lost."""
        if pod.gone_by is None:
            return Actions(delete=(Delete("Pod", pod.name, grace_seconds, pod.uid),))
        lost_at = pod.gone_by + timedelta(seconds=LOST_SECONDS)
        if lost_at > self.now:
            return self.requeued_at(lost_at)
        if pod.role == "trainer":  # its folder has a lock: two must never write it
            return NOTHING
        return Actions(delete=(Delete("Pod", pod.name, 0, pod.uid),))


def pods_of(job: RLHFJob) -> dict[str, int]:
    """Return how many pods each stage has: the trainer has one a node."""
    return workers_of(job) | {"trainer": job.spec.roles.trainer.nodes}

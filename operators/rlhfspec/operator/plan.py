"""What one reconcile of a job decides: what is to be created, deleted, written and said. What carries it out may fail
anywhere in between: the next reconcile decides again, from what is there then.

Example:
    >>> ReconcilePlan(status={"phase": "Pending"}).is_quiet
    True
    >>> ReconcilePlan(status={}, create=({"kind": "Pod"},)).is_quiet
    False
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


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
    resourceVersion that was read), nothing else is done, and the job is reconciled again."""

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

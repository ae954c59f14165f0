"""What one look at a job decides: what is to be applied, deleted, purged, written and said. Whoever carries it out may
fail anywhere in between: the next look decides again, from what is there then.

Example:
    >>> Plan(status={"phase": "Pending"}).is_quiet, Plan(status={}, purge=("3a9d33b1",)).is_quiet
    (True, False)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Delete:
    """`grace_seconds`: None: the object's own; 0: at once, without asking its node. `uid`: a precondition, so that
    nothing made since is hit. An object that is not there any more, or another by now, is no error."""

    kind: Literal["Pod"]
    name: str
    grace_seconds: int | None
    uid: str


@dataclass(frozen=True, slots=True)
class Event:
    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """To be carried out in this order: the finalizer is added, the status is written, then deleted, applied, purged;
    the finalizer is removed last. The status is the memory of what was decided: where it cannot be written (somebody
    wrote since: a conflict on the resourceVersion that was looked at), nothing else is done, and the job is looked at
    again."""

    status: dict[str, Any]
    apply: tuple[dict[str, Any], ...] = ()  # in this order
    delete: tuple[Delete, ...] = ()
    purge: tuple[str, ...] = ()  # uids of runs whose streams are to go; Observed.purged says which are gone
    events: tuple[Event, ...] = ()
    add_finalizer: bool = False
    remove_finalizer: bool = False
    requeue_seconds: float | None = None  # look again then, even if nothing happens

    @property
    def is_quiet(self) -> bool:
        """Nothing to do but perhaps to write the status."""
        return not (self.apply or self.delete or self.purge or self.add_finalizer or self.remove_finalizer)

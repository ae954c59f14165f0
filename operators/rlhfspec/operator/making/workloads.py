"""Cache of Kueue's objects: Workloads of jobs, ResourceFlavors and PriorityClasses.

Example:
    >>> view = workload_view({"metadata": {"name": "rlhfjob-sums-6f1c", "namespace": "rl", "uid": "9", "generation": 1,
    ...     "resourceVersion": "7", "creationTimestamp": "2026-01-01T00:00:00Z"}, "spec": {},
    ...     "status": {"conditions": [{"type": "Admitted", "status": "True", "reason": "Admitted", "message": ""}]}})
    >>> view.is_admitted, view.holds_quota
    (True, False)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rlhfspec.cluster import names

Json = dict[str, Any]
Key = tuple[str, str]  # namespace, name: of a job
KUEUE_GROUP = "kueue.x-k8s.io"
WORKLOAD_VERSION, WORKLOAD_KIND, FLAVOR = f"{KUEUE_GROUP}/v1beta2", "Workload", "ResourceFlavor"
PRIORITY_VERSION, PRIORITY = "scheduling.k8s.io/v1", "PriorityClass"
ASKED = f"{names.GROUP}/asked"  # annotation: hash of the request
MOST_GONE = 10_000  # uids remembered as deleted


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadView:
    name: str
    uid: str
    version: str
    generation: int
    created: datetime
    owner: str = ""  # uid of the job
    asked: str = ""
    is_deleting: bool = False
    conditions: tuple[Mapping[str, Any], ...] = ()
    flavors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by role
    counts: Mapping[str, int] = field(default_factory=dict)  # by role: pods with quota
    checks: tuple[Mapping[str, Any], ...] = ()  # admission checks with pod changes

    def condition(self, type_: str) -> Mapping[str, Any]:
        """Return the condition of this type, or {}."""
        return next((each for each in self.conditions if each["type"] == type_), {})

    def is_true(self, type_: str) -> bool:
        return bool(self.condition(type_).get("status") == "True")

    @property
    def is_admitted(self) -> bool:
        """Return whether the job may run now."""
        over = self.is_deleting or self.is_true("Evicted") or self.is_true("Finished")
        return self.is_true("Admitted") and not over

    @property
    def holds_quota(self) -> bool:
        return self.is_true("QuotaReserved")


def workload_view(body: Mapping[str, Any]) -> WorkloadView:
    metadata, status = body["metadata"], body.get("status") or {}
    assigned = (status.get("admission") or {}).get("podSetAssignments") or ()
    return WorkloadView(
        name=metadata["name"], uid=metadata["uid"], version=metadata["resourceVersion"],
        generation=metadata.get("generation", 1), created=datetime.fromisoformat(metadata["creationTimestamp"]),
        owner=(owner_of(metadata) or {}).get("uid", ""), asked=(metadata.get("annotations") or {}).get(ASKED, ""),
        is_deleting="deletionTimestamp" in metadata, conditions=tuple(status.get("conditions") or ()),
        flavors={each["name"]: tuple(dict.fromkeys((each.get("flavors") or {}).values())) for each in assigned},
        counts={each["name"]: each["count"] for each in assigned if "count" in each},
        checks=tuple(status.get("admissionChecks") or ()),
    )  # fmt: skip


def owner_of(metadata: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the owner reference to the controlling job, or None."""
    owners = metadata.get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller") and owner["kind"] == names.KIND), None)


@dataclass(frozen=True, slots=True)
class Queueing:
    """Kueue's objects for one job: its Workload, and all flavors and priorities by name."""

    workload: WorkloadView | None = None
    flavors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    priorities: Mapping[str, int] = field(default_factory=dict)


class Workloads:
    """Cache of Kueue's objects, in which older resource versions never replace newer ones."""

    def __init__(self) -> None:
        self._by_job: dict[str, tuple[Key, WorkloadView]] = {}  # by the job's uid
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._flavors: dict[str, Mapping[str, Any]] = {}
        self._priorities: dict[str, int] = {}

    def of(self, job_uid: str) -> Queueing:
        _, view = self._by_job.get(job_uid, (None, None))
        return Queueing(view, self._flavors, self._priorities)

    # --- from watches: each returns the affected job -----------------------------------------------------------------

    def put(self, body: Json) -> Key | None:
        owner, view = owner_of(body["metadata"]), workload_view(body)
        if owner is None or view.uid in self._gone:
            return None
        _, held = self._by_job.get(view.owner, (None, None))
        if held is not None and held.uid == view.uid and int(held.version) >= int(view.version):
            return None
        key = (body["metadata"]["namespace"], owner["name"])
        self._by_job[view.owner] = (key, view)
        return key

    def remove(self, body: Json) -> Key | None:
        return self._remove(body["metadata"]["uid"])

    def _remove(self, uid: str) -> Key | None:
        self._gone[uid] = None
        if len(self._gone) > MOST_GONE:
            self._gone.popitem(last=False)
        job = next((job for job, (_, view) in self._by_job.items() if view.uid == uid), None)
        return self._by_job.pop(job)[0] if job is not None else None

    def leave(self, namespace: str) -> None:
        self._by_job = {job: held for job, held in self._by_job.items() if held[0][0] != namespace}

    def put_flavor(self, body: Json) -> None:
        self._flavors[body["metadata"]["name"]] = body.get("spec") or {}

    def remove_flavor(self, body: Json) -> None:
        self._flavors.pop(body["metadata"]["name"], None)

    def put_priority(self, body: Json) -> None:
        self._priorities[body["metadata"]["name"]] = body["value"]

    def remove_priority(self, body: Json) -> None:
        self._priorities.pop(body["metadata"]["name"], None)

    def uids(self, namespace: str | None) -> set[str]:
        return {view.uid for key, view in self._by_job.values() if namespace in (None, key[0])}

    def gone(self, uids: Iterable[str]) -> list[Key]:
        return [key for uid in uids if (key := self._remove(uid)) is not None]

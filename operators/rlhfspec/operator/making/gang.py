"""All pods of a run or none: what each provider wants to see on a pod, and beside it. Kueue has said where they go
before the run began (`kueue`).

Example:
    >>> group_name("sums", "3a9d33b1")
    'sums-3a9d33b1'
"""

from __future__ import annotations

from typing import Any

from rlhfspec.cluster import names
from rlhfspec.operator.deciding.draft import Draft
from rlhfspec.operator.deciding.observed import Worker
from rlhfspec.operator.deciding.wanted import counts_of

POD_GROUPS = {"volcano": "scheduling.volcano.sh/v1beta1", "coscheduling": "scheduling.x-k8s.io/v1alpha1"}


def group_name(job: str, run: str) -> str:
    return f"{job}-{run}"


def group_counts(draft: Draft) -> dict[str, int]:
    """What starts together: every role's workers, of elastic generators the fewest."""
    replicas = draft.spec.roles.generator.replicas
    return counts_of(draft) | ({"generator": replicas.min} if replicas else {})


def overlay(draft: Draft, key: Worker) -> dict[str, Any]:
    """Merged into the pod. `prepare` runs before the group, and generators that were added later beside it."""
    scheduling, (role, worker) = draft.spec.scheduling, key
    name = group_name(draft.job.name, draft.run_uid)
    counts = group_counts(draft)
    is_member = role != names.PREPARE and worker < counts.get(role, 0)
    if scheduling.gang == "kueue":
        place = draft.memory.placed.get(names.CONTROL if role == names.PREPARE else role, {})
        return {part: place[part] for part in ("metadata", "spec") if part in place}
    if scheduling.gang == "volcano":
        annotations = {"scheduling.k8s.io/group-name": name} if is_member else {}
        queue = {"scheduling.volcano.sh/queue-name": scheduling.queue} if scheduling.queue else {}
        return {"metadata": {"annotations": annotations | queue}, "spec": {"schedulerName": "volcano"}}
    if scheduling.gang == "coscheduling":
        labels = {"scheduling.x-k8s.io/pod-group": name} if is_member else {}
        return {"metadata": {"labels": labels}, "spec": {"schedulerName": draft.settings.coscheduler}}
    return {}


def pod_group(draft: Draft, metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """The object that volcano and coscheduling want beside the pods."""
    scheduling = draft.spec.scheduling
    if scheduling.gang not in POD_GROUPS:
        return []
    spec: dict[str, Any] = {"minMember": sum(group_counts(draft).values())}
    if scheduling.gang == "volcano":
        spec |= {"queue": scheduling.queue} if scheduling.queue else {}
        spec |= {"priorityClassName": scheduling.priority_class} if scheduling.priority_class else {}
    else:
        spec["scheduleTimeoutSeconds"] = 60
    name = group_name(draft.job.name, draft.run_uid)
    return [
        {
            "apiVersion": POD_GROUPS[scheduling.gang],
            "kind": "PodGroup",
            "metadata": metadata | {"name": name},
            "spec": spec,
        }
    ]

"""Kueue integration: a job is one Workload, which the operator creates and keeps up to date.

    not admitted   the job waits and shows Kueue's message
    admitted       a run opens on the nodes that Kueue chose
    evicted        the run closes, the trainer first; then the quota is released
    over           the Workload is finished and its quota free

The operator never writes `spec.suspend`. Kueue does not manage pods, so workers restart without it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rlhfspec.cluster import names
from rlhfspec.messages.loop import GATEWAY
from rlhfspec.operator.deciding.memory import JobOutcome, Memory, text_of
from rlhfspec.operator.deciding.situation import NOTHING, Actions, Situation, WorkloadWrite, pods_of, requeued
from rlhfspec.operator.making import objects, trial
from rlhfspec.operator.making.workloads import (
    ASKED,
    KUEUE_GROUP,
    PRIORITY,
    WORKLOAD_KIND,
    WORKLOAD_VERSION,
    WorkloadView,
)

DEFAULT_QUEUE = "default"  # Kueue's own default LocalQueue
NO_KUEUE_SECONDS = 5.0  # a running Kueue answers sooner
# Pod fields that Kueue uses for placement.
_OF_SPEC = (
    "nodeSelector", "affinity", "tolerations", "priorityClassName", "runtimeClassName", "overhead", "resourceClaims",
)  # fmt: skip
_OF_CONTAINER = ("name", "image", "resources", "restartPolicy")
_NOT_THERE = ("NotFound", "404")  # 404: Kueue is not installed
# After these evictions a job may be admitted again at once; for others Kueue sets the time.
_REQUEUED_AT_ONCE = ("Preempted", "NodeFailures")


def is_queued(known: Situation) -> bool:
    """Return whether Kueue decides when the job runs."""
    return known.job.job is not None and known.spec.scheduling.gang == "kueue"


def admits(known: Situation) -> bool:
    """Return whether Kueue allows a run to open."""
    if not is_queued(known):
        return True
    seen = known.observed.queueing.workload
    if seen is None or not seen.is_admitted or seen.asked != _asked(workload_of(known)):
        return False
    return not _unknown_flavors(known, seen)


def withdraws(known: Situation) -> bool:
    """Return whether Kueue requires the run to close; a missing Workload is no reason."""
    seen = known.observed.queueing.workload
    return is_queued(known) and seen is not None and not seen.is_admitted


def why_it_waits(known: Situation) -> Iterator[str]:
    if not is_queued(known) or known.spec.suspend or known.memory.state == "open":
        return
    for refusal in known.observed.refusals:
        if refusal.kind == WORKLOAD_KIND:
            hint = (
                f"; is Kueue installed, and does it serve {WORKLOAD_VERSION}?" if refusal.reason in _NOT_THERE else ""
            )
            yield f"{WORKLOAD_KIND} {refusal.name}: {refusal.message}{hint}"
    if (seen := known.observed.queueing.workload) is not None:
        yield from _said_of(known, seen)


def _said_of(known: Situation, seen: WorkloadView) -> Iterator[str]:
    queue, reserved = queue_of(known), seen.condition("QuotaReserved")
    if seen.is_true("Evicted"):
        evicted = seen.condition("Evicted")
        yield f"Kueue evicted the job ({evicted['reason']}): {evicted.get('message', '')}"
    elif seen.holds_quota and not seen.is_true("Admitted"):
        checks = [f"{c['name']} ({c['state']}) {c.get('message', '')}".rstrip() for c in seen.checks]
        yield f"Kueue reserved quota for the job in queue {queue} and waits for {', '.join(checks) or 'its checks'}"
    elif seen.is_admitted:
        yield from (f"ResourceFlavor {name}, chosen by Kueue, does not exist" for name in _unknown_flavors(known, seen))
    elif reserved:
        yield f"queue {queue}: {reserved.get('message', '')}"
    elif known.seconds_since(seen.created) >= NO_KUEUE_SECONDS:
        yield f"queue {queue}: Kueue has not responded yet; is it running?"


def places(known: Situation) -> dict[str, dict[str, Any]]:
    """Return, by role, the admitted number of pods and Kueue's additions to each pod."""
    seen = known.observed.queueing.workload
    if not is_queued(known) or seen is None:
        return {}
    return {role: {"count": count, **_additions(known, seen, role)} for role, count in seen.counts.items()}


def _additions(known: Situation, seen: WorkloadView, role: str) -> dict[str, Any]:
    flavors = known.observed.queueing.flavors
    changes: list[Mapping[str, Any]] = [
        {"nodeSelector": flavor.get("nodeLabels"), "tolerations": flavor.get("tolerations")}
        for flavor in (flavors[name] for name in seen.flavors.get(role, ()))
    ]
    changes += [each for check in seen.checks for each in check.get("podSetUpdates") or () if each["name"] == role]
    found: dict[str, Any] = {"labels": {}, "annotations": {}, "nodeSelector": {}}
    for kind, kept in found.items():
        for change in changes:
            kept |= change.get(kind) or {}
    tolerations = [each for change in changes for each in change.get("tolerations") or ()]
    found["tolerations"] = [each for index, each in enumerate(tolerations) if each not in tolerations[:index]]
    parts = {"metadata": ("labels", "annotations"), "spec": ("nodeSelector", "tolerations")}
    said = {part: {kind: found[kind] for kind in kinds if found[kind]} for part, kinds in parts.items()}
    return {part: kinds for part, kinds in said.items() if kinds}


def _unknown_flavors(known: Situation, seen: WorkloadView) -> list[str]:
    chosen = dict.fromkeys(name for names_ in seen.flavors.values() for name in names_)
    return [name for name in chosen if name not in known.observed.queueing.flavors]


def settle(known: Situation) -> Actions:
    if known.job.deleting_since is not None:
        return NOTHING
    memory, seen = known.memory, known.observed.queueing.workload
    write: WorkloadWrite | None = None
    if memory.outcome is not None:
        if seen is not None and not seen.is_true("Finished") and memory.state == "closed":
            write = _finish(known, seen, memory.outcome)
    elif seen is None:
        return _create(known) if _belongs_in_queue(known) else NOTHING
    elif seen.is_deleting or known.job.job is None:
        return NOTHING
    elif not is_queued(known):  # it was edited before it began
        write = WorkloadWrite("delete", seen.name, seen.uid)
    elif memory.state == "open":
        write = _say_ready(known, seen)
    elif memory.state == "closed":
        return _give_back(known, seen)
    return Actions(workload=write)


def _belongs_in_queue(known: Situation) -> bool:
    """Return whether the job should have a Workload."""
    if not is_queued(known) or _is_paused(known):
        return False
    return known.memory.state == "open" or (known.memory.state == "closed" and trial.is_passed(known))


def _is_paused(known: Situation) -> bool:
    return known.memory.state == "closed" and known.spec.suspend


def _give_back(known: Situation, seen: WorkloadView) -> Actions:
    """Release the quota of an evicted job, or delete the Workload of a suspended, finished or changed one."""
    is_over = _is_paused(known) or seen.is_true("Finished")
    if is_over or seen.asked != _asked(workload_of(known)):
        return Actions(workload=WorkloadWrite("delete", seen.name, seen.uid))
    if seen.is_true("Evicted") and seen.holds_quota:
        return Actions(workload=_release(known, seen))
    is_unclear = not seen.conditions or (seen.is_admitted and _unknown_flavors(known, seen))
    return requeued(NO_KUEUE_SECONDS) if is_unclear else NOTHING


def _create(known: Situation) -> Actions:
    workload = workload_of(known)
    name = workload["metadata"]["name"]
    if seconds := known.refused_seconds(WORKLOAD_KIND, name):
        return requeued(seconds)
    return Actions(workload=WorkloadWrite("create", name, body=workload))


def _release(known: Situation, seen: WorkloadView) -> WorkloadWrite:
    """Return the status write that frees the quota and requeues the job."""
    evicted = seen.condition("Evicted")
    reason, message = evicted["reason"], evicted.get("message", "")
    changes = [
        ("QuotaReserved", False, "Pending", message),
        ("Admitted", False, "NoReservation", "The job is not running"),
        ("Requeued", reason in _REQUEUED_AT_ONCE, reason, message),
    ]
    if seen.is_true("PodsReady"):
        changes.append(("PodsReady", False, "Evicted", message))
    return _status(known, seen, changes, admission=None)


def _finish(known: Situation, seen: WorkloadView, outcome: JobOutcome) -> WorkloadWrite:
    return _status(known, seen, [("Finished", True, outcome.type, outcome.message or outcome.reason)])


def _say_ready(known: Situation, seen: WorkloadView) -> WorkloadWrite | None:
    """Report PodsReady once, because Kueue may evict jobs that never become ready."""
    if known.memory.running_since is None or seen.is_true("PodsReady"):
        return None
    return _status(known, seen, [("PodsReady", True, "Started", "All pods of the job have been ready")])


def _status(
    known: Situation, seen: WorkloadView, changes: list[tuple[str, bool, str, str]], **status: Any
) -> WorkloadWrite:
    conditions = {each["type"]: each for each in seen.conditions}
    for type_, is_true, reason, message in changes:
        conditions[type_] = {
            "type": type_, "status": str(is_true), "reason": reason, "message": message[:32768],
            "lastTransitionTime": text_of(known.now.replace(microsecond=0)), "observedGeneration": seen.generation,
        }  # fmt: skip
    patch = {"conditions": list(conditions.values()), **status}
    metadata = {"resourceVersion": seen.version}
    return WorkloadWrite("status", seen.name, seen.uid, {"metadata": metadata, "status": patch})


def queue_of(known: Situation) -> str:
    return known.spec.scheduling.queue or DEFAULT_QUEUE


def workload_of(known: Situation) -> dict[str, Any]:
    """Return the Workload, which depends only on the job and not on its run."""
    blank = replace(known, memory=Memory())
    sets = [_pod_set(blank, role, count) for role, count in counts(known).items() if count]
    spec = {"queueName": queue_of(known), "podSets": sets, **_priority(known, sets)}
    metadata = objects.metadata(known) | {
        "name": names.workload_name(known.job.name, known.job.uid),
        "annotations": {ASKED: hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]},
    }
    metadata["labels"] = metadata["labels"] | {f"{KUEUE_GROUP}/job-uid": known.job.uid}
    return {"apiVersion": WORKLOAD_VERSION, "kind": WORKLOAD_KIND, "metadata": metadata, "spec": spec}


def _asked(workload: dict[str, Any]) -> str:
    return str(workload["metadata"]["annotations"][ASKED])


def counts(known: Situation) -> dict[str, int]:
    """Return the number of pods per role, without the gateway, which no run waits for; of generators the maximum."""
    assert known.job.job is not None
    wanted = {names.CONTROL: 1} | pods_of(known.job.job)
    wanted.pop(GATEWAY.name, None)
    replicas = known.spec.roles.generator.replicas
    return wanted | ({"generator": max(replicas.min, replicas.max)} if replicas else {})


def _pod_set(blank: Situation, role: str, count: int) -> dict[str, Any]:
    pod = objects.pod(blank, (role, 0))["spec"]
    kept = {name: pod[name] for name in _OF_SPEC if name in pod}
    for kind in ("containers", "initContainers"):
        if kind in pod:
            kept[kind] = [{name: each[name] for name in _OF_CONTAINER if name in each} for each in pod[kind]]
    return {"name": role, "count": count, "template": {"spec": kept}}


def _priority(known: Situation, sets: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the Workload's priority fields, from the trainer's PriorityClass, or {}."""
    trainer = next(each for each in sets if each["name"] == "trainer")
    name = trainer["template"]["spec"].get("priorityClassName")
    if name is None or name not in known.observed.queueing.priorities:
        return {}
    reference = {"group": "scheduling.k8s.io", "kind": PRIORITY, "name": name}
    return {"priorityClassRef": reference, "priority": known.observed.queueing.priorities[name]}

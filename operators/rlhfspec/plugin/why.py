"""`kubectl rlhf why`: the reason of a job's state, with evidence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlhfspec.cluster.names import CONTROL
from rlhfspec.errors import ClusterUnavailable
from rlhfspec.plugin.logs import parsed
from rlhfspec.plugin.pods import age, condition_of, name_of, role_of, state_of, worker_of

if TYPE_CHECKING:
    from rlhfspec.plugin.cluster import Cluster

Json = dict[str, Any]
MOST_PODS, MOST_EVENTS, LOG_LINES = 4, 6, 6
PROBE_FAILED = "Unhealthy"  # the kubelet's reason
# Reasons that control reports, with the evidence in its log.
_TROUBLE_REASONS = ("BrokerUnavailable", "RecordUndeliverable", "RewardFailing", "Stalled", "StorageFull")
_OVER = ("Ready", "Completed", "Terminating")


def explanation(cluster: Cluster, job: Json) -> Iterator[str]:
    """Yield lines with the reason of the job's state and its evidence."""
    status, name = job.get("status") or {}, name_of(job)
    pods = cluster.pods(name)
    yield from _answer(job, status)
    unwell = [pod for pod in pods if not state_of(pod).is_well]
    for pod in unwell[:MOST_PODS]:
        state = state_of(pod)
        yield f"pod {name_of(pod)}: {state.word}" + (f": {state.detail}" if state.detail else "")
    if len(unwell) > MOST_PODS:
        yield f"and {len(unwell) - MOST_PODS} more pods like these"
    # Warnings of a pod that is or was ready are obsolete.
    yield from _events(cluster, job, [pod for pod in pods if state_of(pod).word not in _OVER])
    for pod in (unwell or _named_in(status, pods))[:MOST_PODS]:
        yield from _log(cluster, pod)


def _answer(job: Json, status: Json) -> Iterator[str]:
    name, phase = name_of(job), status.get("phase")
    if phase is None:
        yield f"{name}: no operator has processed it yet: is one running, and does it watch this namespace?"
        return
    healthy = condition_of(job, "Healthy")
    reason, message = status.get("reason"), status.get("message")
    if healthy.get("status") == "False":
        reason, message = healthy.get("reason"), healthy.get("message")
    since = f" (since {age(healthy.get('lastTransitionTime'))})" if healthy.get("status") == "False" else ""
    shown = f"step {status['progress'].get('shown', '?')}" if status.get("progress") else "no step yet"
    if reason and phase != "Succeeded":
        yield f"{name} is {phase}: {reason}{since}: {message}"
    else:
        suspended = " (spec.suspend; `kubectl rlhf resume` continues it)" if phase == "Suspended" else ""
        yield f"{name} is {phase}{suspended}, {shown}; no problem is known"
    waiting = [f"{role} {counts.get('ready', 0)}/{counts.get('wanted', 0)}" for role, counts in _waited_for(status)]
    if waiting and phase not in ("Succeeded", "Failed", "Suspended"):
        yield f"not ready yet: {', '.join(waiting)}"


def _waited_for(status: Json) -> list[tuple[str, Json]]:
    roles = (status.get("roles") or {}).items()
    return [(role, counts) for role, counts in roles if counts.get("ready", 0) < counts.get("wanted", 0)]


def _events(cluster: Cluster, job: Json, pods: list[Json]) -> Iterator[str]:
    """Yield recent warnings about a job and its pods, without failed probes if the job is healthy."""
    is_well = condition_of(job, "Healthy").get("status") == "True"
    uids = {name_of(each): each["metadata"]["uid"] for each in (job, *pods)}
    seen = set[tuple[str, ...]]()
    for event in reversed(cluster.warnings(set(uids))):
        about = event["involvedObject"]
        if about.get("uid", uids[about["name"]]) != uids[about["name"]]:
            continue
        if is_well and event.get("reason") == PROBE_FAILED:
            continue
        told = (
            event["involvedObject"]["name"],
            str(event.get("reason")),
            " ".join(str(event.get("message", "")).split()),
        )
        if told not in seen and len(seen) < MOST_EVENTS:
            seen.add(told)
            when = event.get("lastTimestamp") or event.get("eventTime")
            yield f"event {age(when)} ago, {told[0]}: {told[1]}: {told[2][:400]}"


def _named_in(status: Json, pods: list[Json]) -> list[Json]:
    message = str(status.get("message", ""))
    of_control = [pod for pod in pods if role_of(pod) == CONTROL and status.get("reason") in _TROUBLE_REASONS]
    return of_control + [pod for pod in pods if name_of(pod) in message or worker_of(pod) in message]


def _log(cluster: Cluster, pod: Json) -> Iterator[str]:
    """Yield the last log lines of a pod."""
    try:
        said = list(cluster.log(name_of(pod), tail=LOG_LINES))
    except ClusterUnavailable:
        return
    if said:
        yield f"log of {name_of(pod)}:"
        yield from (f"  {parsed(line, worker_of(pod)).as_text().plain}" for line in said)

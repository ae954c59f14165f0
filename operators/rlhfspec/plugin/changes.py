"""`kubectl rlhf suspend`, `resume` and `drain`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rlhfspec.errors import ClusterUnavailable, InvalidRequest, did_you_mean
from rlhfspec.plugin.pods import is_running, name_of, node_of, worker_of

if TYPE_CHECKING:
    from rlhfspec.plugin.cluster import Cluster

_POLL_DRAIN_SECONDS = 1.0


def suspend(cluster: Cluster, job: str, *, is_on: bool) -> str:
    found = cluster.job(job)
    if is_on and (found.get("status") or {}).get("phase") == "Succeeded":
        return f"{job}: has already succeeded; there is nothing to suspend"
    old = bool(found["spec"].get("suspend"))
    if old == is_on:
        return f"{job}: suspend is already {str(is_on).lower()}"
    cluster.change_job(job, {"spec": {"suspend": is_on}})
    return f"{job}: " + (
        "finishes its step, writes a checkpoint and deletes its pods" if is_on else "continues from its checkpoint"
    )


def to_drain(cluster: Cluster, job: str, worker: str | None, node: str | None) -> list[dict[str, Any]]:
    if (worker is None) == (node is None):
        raise InvalidRequest("drain", worker, "needs either a worker, such as generator-1, or --node")
    cluster.job(job)
    running = [pod for pod in cluster.pods(job) if is_running(pod)]
    if worker is not None:
        chosen = [pod for pod in running if worker in (worker_of(pod), name_of(pod))]
        if not chosen:
            there = [worker_of(pod) for pod in running]
            hint = did_you_mean(worker, there) or f"; running: {', '.join(there) or 'none'}"
            raise InvalidRequest("WORKER", worker, f"no such worker of {job} is running{hint}")
        return chosen
    chosen = [pod for pod in running if node_of(pod) == node]
    if not chosen:
        nodes = sorted({node_of(pod) for pod in running})
        raise InvalidRequest("--node", node, f"no pod of {job} runs on it; its nodes: {', '.join(nodes) or 'none'}")
    return chosen


def drain(
    cluster: Cluster,
    pods: list[dict[str, Any]],
    *,
    timeout_seconds: float,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """Evict pods, wait until they left, and yield lines of progress."""
    waited_for = {}
    for pod in pods:
        cluster.evict(name_of(pod))
        waited_for[name_of(pod)] = pod["metadata"]["uid"]
        yield f"{worker_of(pod)}: asked to leave {node_of(pod)}"
    began = now()
    while waited_for:
        for name, uid in list(waited_for.items()):
            pod_now = cluster.pod(name)
            if pod_now is None or pod_now["metadata"]["uid"] != uid or not _has_work(pod_now):
                del waited_for[name]
                yield f"{name}: has left"
        if waited_for and now() - began > timeout_seconds:
            still = ", ".join(sorted(waited_for))
            raise ClusterUnavailable("drain", f"still there after {timeout_seconds:g} s: {still}")
        if waited_for:
            sleep(_POLL_DRAIN_SECONDS)


def _has_work(pod: dict[str, Any]) -> bool:
    return pod["status"].get("phase") not in ("Succeeded", "Failed")

"""A trainer of several nodes: its pods are one worker, which begins again as a whole."""

from __future__ import annotations

from rlhfspec.operator.deciding.draft import Draft
from rlhfspec.operator.deciding.failures import count_in, end_of
from rlhfspec.operator.deciding.observed import PodView, Worker

BROKEN_SECONDS = (
    2  # of grace for the rest of a set that lacks a rank: it can finish nothing, and may hang in an exchange
)


def has_left(pod: PodView) -> bool:
    """Rank 0, at another node, let its ranks go, and may still have something to do."""
    return pod.role == "trainer" and pod.worker > 0 and pod.is_finished and end_of(pod).cause != "failure"


def count_in_set(draft: Draft, ended: list[PodView]) -> None:
    """The end of the pod that ended the set; what the others ended of, for want of it, is no failure of theirs."""
    ended = [pod for pod in ended if not has_left(pod)]
    if not ended:
        return
    known = {pod.uid: draft.worker_memory(pod.key) for pod in ended}
    new = [pod for pod in ended if known[pod.uid].pod != pod.uid]
    if len(new) == len(ended):
        first = min(new, key=_likely_cause)
        count_in(draft, first)
        new.remove(first)
    for pod in new:
        known[pod.uid].pod = pod.uid


def _likely_cause(pod: PodView) -> tuple[bool, float, int]:
    """A pod that was killed, or that its node ended, before one that says that it failed; of these the first."""
    end = end_of(pod)
    at = pod.terminated.at if pod.terminated else None
    return end.cause == "failure" and end.failure != "killed", at.timestamp() if at else 0.0, pod.worker


def keep_together(draft: Draft, due: list[Worker]) -> list[Worker]:
    """Of the pods that are due those that may be made: none of a set as long as one of an earlier set is there, and not
    before the set may begin. When one of it ends, so do all."""
    if draft.spec.roles.trainer.nodes == 1:
        return due
    pods = [pod for pod in draft.pods if pod.role == "trainer"]
    ends = any((pod.is_finished and not has_left(pod)) or pod.is_deleting or pod.run != draft.run_uid for pod in pods)
    grace = BROKEN_SECONDS if any(pod.is_finished and end_of(pod).cause == "failure" for pod in pods) else None
    for pod in pods if ends else ():
        if not pod.is_deleting and (not pod.is_finished or has_left(pod)):
            draft.remove(pod, grace)
    own = [key for key in due if key[0] == "trainer"]
    times = [memory.restart_not_before for name, memory in draft.memory.workers.items() if name.startswith("trainer-")]
    waits = any(at is not None and at > draft.now for at in times)
    lacks_some = len(own) + len(pods) < draft.spec.roles.trainer.nodes  # one that was refused, or may not begin yet
    return [key for key in due if key not in own] if ends or waits or lacks_some else due

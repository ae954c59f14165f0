"""How a pod ended, whether that counts, and when its worker is started again: the laptop's rule (`service.restarts`),
its counters in the job's status.

Example:
    >>> from dataclasses import replace
    >>> from datetime import UTC, datetime
    >>> from rlhfspec.operator.deciding.observed import Terminated
    >>> now = datetime(2026, 1, 1, tzinfo=UTC)
    >>> pod = PodView(name="sums-reward-0", uid="7", role="reward", worker=0, run="3a9d", created=now, phase="Failed",
    ...               terminated=Terminated(137, "OOMKilled"))
    >>> end_of(pod).failure, end_of(pod).message
    ('killed', 'it took more memory than its limit')
    >>> end_of(replace(pod, terminated=Terminated(137, message="W1128 no triton"))).message
    'killed by SIGKILL; its log ends with: W1128 no triton'
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from rlhfspec.job.cluster import Rule
from rlhfspec.messages.loop import BY_NAME
from rlhfspec.operator.deciding.draft import Draft, worker_name
from rlhfspec.operator.deciding.observed import PodView
from rlhfspec.supervisor.restarts import Restarts
from rlhfspec.worker.exits import PERMANENT, Failure, failure_of, is_about_full_disk, said

COMPLETED, _LEFT = "completed:", "left:"  # how the last line of a worker begins
# Reasons of a whole pod that its node, or the cluster, had for ending it: no fault of the job's.
DISRUPTIONS = {
    "Evicted", "NodeLost", "NodeShutdown", "Terminated", "Preempting", "UnexpectedAdmissionError", "NodeAffinity",
    "OutOfcpu", "OutOfmemory", "OutOfpods",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PodEnd:
    cause: Literal["completed", "left", "disruption", "failure"]
    failure: Failure | None = None
    exit_code: int | None = None
    reason: str = ""
    message: str = ""


def end_of(pod: PodView) -> PodEnd:
    """Of a finished pod."""
    ended = pod.terminated
    code = ended.exit_code if ended else None
    message = (ended.message if ended else "") or ""
    if pod.phase == "Succeeded":
        if pod.role in BY_NAME and not message.startswith((COMPLETED, _LEFT)):  # such as a reward that ends its process
            return PodEnd("failure", "error", 0, "Error", f"{said(0)}, and it was not asked to")
        return PodEnd("left" if pod.role == "trainer" and not message.startswith(COMPLETED) else "completed",
                   exit_code=0, reason="Completed", message=message)  # fmt: skip
    why = pod.why if pod.why and pod.why.reason in DISRUPTIONS else pod.disruption
    if why is not None:
        return PodEnd("disruption", exit_code=code, reason=why.reason, message=why.message)
    if ended is None or code is None:  # the pod failed and no container says how
        said_of_pod = pod.why.message if pod.why else "it failed, and nothing says how"
        return PodEnd("disruption", reason=pod.why.reason if pod.why else "Unknown", message=said_of_pod)
    if ended.reason == "OOMKilled":
        return PodEnd("failure", "killed", code, "OOMKilled", "it took more memory than its limit")
    status = 128 - code if code > 128 else code  # negative: the signal that killed it
    failure, how = failure_of(status), said(status)
    reason = "Temporary" if failure == "temporary" else "Error"
    if status < 0 and message and how not in message:  # not its own words, but where its log stopped
        message = f"{how}; its log ends with: {message}"
    return PodEnd("failure", failure, code, reason, message or how)


def is_complete(pod: PodView) -> bool:
    """The last step is trained."""
    return pod.role == "trainer" and pod.phase == "Succeeded" and end_of(pod).cause == "completed"


def count_in(draft: Draft, pod: PodView) -> None:
    """The end of a pod that is not to have ended: once, however often it is looked at."""
    memory = draft.worker_memory(pod.key)
    if memory.pod == pod.uid:
        return
    end = end_of(pod)
    memory.pod, memory.reason, memory.message = pod.uid, end.reason, end.message[:500]
    rule = _rule_for(draft, pod.role, end)
    if end.cause == "failure" and (rule.action == "FailJob" if rule else end.exit_code == PERMANENT):
        reason = "FailurePolicy" if rule else reason_of_permanent(pod.role, end.message)
        return draft.end("Failed", reason, f"{worker_name(pod.key)}: {end.message}")
    delay = _delay_after(draft, pod, end, rule)
    if delay is None:
        reason = "StorageFull" if is_about_full_disk(end.message) else "CrashLoop"
        many = f"{memory.num_failures} failures since step {draft.memory.step}, the last: {end.message}"
        return draft.end("Failed", reason, f"{worker_name(pod.key)}: {many}")
    draft.memory.total += 1
    memory.restarts += 1
    ended_at = pod.terminated.at if pod.terminated and pod.terminated.at else draft.now
    memory.restart_not_before = min(ended_at, draft.now) + timedelta(milliseconds=round(delay * 1000))
    return None


def _delay_after(draft: Draft, pod: PodView, end: PodEnd, rule: Rule | None) -> float | None:
    memory = draft.worker_memory(pod.key)
    draw = random.Random(pod.uid)  # the same for every replica, and however often
    restarts = Restarts(draft.spec.failure_policy, draw, num_counted=memory.counted, num_uncounted=memory.uncounted)
    if end.failure == "temporary" and draft.observed.broker is not None:  # the operator cannot reach it either
        return restarts.delay(memory.restarts + 1)
    if end.cause == "disruption":
        memory.disrupted += 1
        return restarts.delay(memory.disrupted)
    counts = {None: None, "Ignore": False, "Restart": True}[rule.action if rule else None]
    failure = end.failure or "killed"
    delay = restarts.delay_after(failure, counts=False if end.cause in ("left", "completed") else counts)
    draft.memory.counted += restarts.num_counted - memory.counted
    memory.counted, memory.uncounted = restarts.num_counted, restarts.num_uncounted
    return delay


def _rule_for(draft: Draft, role: str, end: PodEnd) -> Rule | None:
    if end.cause != "failure":
        return None
    rules = draft.spec.failure_policy.rules
    return next((r for r in rules if end.exit_code in r.exit_codes and (not r.roles or role in r.roles)), None)


def is_about_storage_away(text: str) -> bool:
    """
    >>> is_about_storage_away("storage away: s3://bucket/team: error sending request")
    True
    """
    return text.startswith("storage away: ")


def reason_of_permanent(role: str, message: str) -> str:
    """Of an end that would only happen again.

    >>> reason_of_permanent("prepare", "spec.model.path: no such folder"), reason_of_permanent("reward", "exact: boom")
    ('BadConfig', 'RewardFailing')
    """
    if role == "prepare" or message.startswith("spec."):
        return "BadConfig"
    if is_about_full_disk(message):
        return "StorageFull"
    return "RewardFailing" if role == "reward" else "WorkerFailed"


def forget_after_progress(draft: Draft) -> None:
    """A step was trained since: what failed before it is forgiven."""
    report = draft.report
    if report is None or report.step <= draft.memory.step:
        return
    draft.memory.step = report.step
    for memory in draft.memory.workers.values():
        memory.counted = memory.uncounted = memory.disrupted = 0

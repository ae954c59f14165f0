"""Classification of ended pods, and restart delays of their workers.

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
    'killed by SIGKILL; details: kubectl rlhf why'
"""

from __future__ import annotations

import errno
import os
import random
import re
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

from rlhfspec.job.cluster import Rule
from rlhfspec.messages.loop import BY_NAME, GATEWAY
from rlhfspec.operator.deciding.memory import WorkerMemory
from rlhfspec.operator.deciding.observed import PodView, Worker, worker_name
from rlhfspec.operator.deciding.situation import NOTHING, Actions, Situation
from rlhfspec.supervisor.restarts import Restarts
from rlhfspec.worker.exits import PERMANENT, Failure, failure_of, is_about_full_disk, said

# Grace period of a set's remaining ranks, which may hang in a collective.
BROKEN_SECONDS = 2
COMPLETED, _LEFT = "completed:", "left:"  # prefixes of a worker's last line
_RANK = r"(?:killed by SIG[A-Z]{2,8}|ended with exit code [0-9]{1,3}) \(rank [0-9]+ of [0-9]+ on node [0-9]+\)"
_PUBLIC = re.compile(rf"completed: step [0-9]+|completed:|left:|{_RANK}")
_SPEC_FIELD = re.compile(r"(spec(?:\.[a-zA-Z]{1,40}(?:\[[0-9]{1,3}\])?){1,6})[: ]")
WHERE = "details: kubectl rlhf why"
# Pod reasons caused by node or cluster, not by the job.
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
    ended = pod.terminated
    code = ended.exit_code if ended else None
    message = (ended.message if ended else "") or ""
    fact = _fact_of(message)
    if pod.phase == "Succeeded":
        if pod.role in BY_NAME and not message.startswith((COMPLETED, _LEFT)):  # such as a reward that ends its process
            return PodEnd("failure", "error", 0, "Error", f"{said(0)}, without being asked to stop")
        return PodEnd("left" if pod.role == "trainer" and not message.startswith(COMPLETED) else "completed",
                   exit_code=0, reason="Completed", message=fact)  # fmt: skip
    why = pod.why if pod.why and pod.why.reason in DISRUPTIONS else pod.disruption
    if why is not None:
        return PodEnd("disruption", exit_code=code, reason=why.reason, message=why.message)
    if ended is None or code is None:  # no container status
        said_of_pod = pod.why.message if pod.why else "it failed for an unknown reason"
        return PodEnd("disruption", reason=pod.why.reason if pod.why else "Unknown", message=said_of_pod)
    if ended.reason == "OOMKilled":
        return PodEnd("failure", "killed", code, "OOMKilled", "it took more memory than its limit")
    status = 128 - code if code > 128 else code  # negative: a signal
    failure, how = failure_of(status), said(status)
    reason = "Temporary" if failure == "temporary" else "Error"
    told = fact or how
    return PodEnd("failure", failure, code, reason, f"{told}; {WHERE}" if message and message != told else told)


def _fact_of(words: str) -> str:
    """Return the part of a worker's last message that the job's status may show.

    >>> _fact_of("completed: step 30"), _fact_of("spec.model.path: no such folder (got 'm')"), _fact_of("the key is x")
    ('completed: step 30', 'spec.model.path is refused', '')
    """
    if found := _PUBLIC.match(words):
        return found[0]
    if found := _SPEC_FIELD.match(words):
        return f"{found[1]} is refused"
    if is_about_storage_away(words):
        return "storage away: it does not answer"
    return os.strerror(errno.ENOSPC) if is_about_full_disk(words) else ""


def is_complete(pod: PodView) -> bool:
    return pod.role == "trainer" and pod.phase == "Succeeded" and end_of(pod).cause == "completed"


def count_end(known: Situation, pod: PodView) -> Situation:
    """Return the situation with a pod's unexpected end counted once."""
    name = worker_name(pod.key)
    before = known.memory.of_worker(name)
    if before.pod == pod.uid:
        return known
    end = end_of(pod)
    worker = replace(before, pod=pod.uid, reason=end.reason, message=end.message[:500])
    ends_jobs = pod.role != GATEWAY.name  # clients never end a run
    rule = _rule_for(known, pod.role, end) if ends_jobs else None
    is_fatal = rule.action == "FailJob" if rule else end.exit_code == PERMANENT and ends_jobs
    if end.cause == "failure" and is_fatal:
        reason = "FailurePolicy" if rule else reason_of_permanent(pod.role, end.message)
        return known.remembering_worker(name, worker).ended("Failed", reason, f"{name}: {end.message}")
    worker, delay = _delay_after(known, worker, end, rule)
    counted = known.memory.counted + (worker.counted - before.counted if ends_jobs else 0)
    if delay is None and not ends_jobs:
        delay = known.spec.failure_policy.max_backoff_seconds
    if delay is None:
        reason = "StorageFull" if is_about_full_disk(end.message) else "CrashLoop"
        many = f"{worker.num_failures} failures since step {known.memory.step}, the last: {end.message}"
        return known.remembering_worker(name, worker, counted=counted).ended("Failed", reason, f"{name}: {many}")
    ended_at = pod.terminated.at if pod.terminated and pod.terminated.at else known.now
    not_before = min(ended_at, known.now) + timedelta(milliseconds=round(delay * 1000))
    worker = replace(worker, restarts=worker.restarts + 1, not_before=not_before)
    return known.remembering_worker(name, worker, counted=counted, total=known.memory.total + 1)


def _delay_after(
    known: Situation, worker: WorkerMemory, end: PodEnd, rule: Rule | None
) -> tuple[WorkerMemory, float | None]:
    """Return the worker with this end counted, and the seconds before its restart (None: never)."""
    draw = random.Random(worker.pod)  # deterministic for all replicas
    restarts = Restarts(known.spec.failure_policy, draw, num_counted=worker.counted, num_uncounted=worker.uncounted)
    if end.failure == "temporary" and known.observed.broker is not None:  # the operator cannot reach it either
        return worker, restarts.delay(worker.restarts + 1)
    if end.cause == "disruption":
        return replace(worker, disrupted=worker.disrupted + 1), restarts.delay(worker.disrupted + 1)
    counts = {None: None, "Ignore": False, "Restart": True}[rule.action if rule else None]
    failure = end.failure or "killed"
    delay = restarts.delay_after(failure, counts=False if end.cause in ("left", "completed") else counts)
    return replace(worker, counted=restarts.num_counted, uncounted=restarts.num_uncounted), delay


def _rule_for(known: Situation, role: str, end: PodEnd) -> Rule | None:
    if end.cause != "failure":
        return None
    rules = known.spec.failure_policy.rules
    return next((r for r in rules if end.exit_code in r.exit_codes and (not r.roles or role in r.roles)), None)


def is_about_storage_away(text: str) -> bool:
    """Return whether a message reports an unreachable object store.

    >>> is_about_storage_away("storage away: s3://bucket/team: error sending request")
    True
    """
    return text.startswith("storage away: ")


def reason_of_permanent(role: str, message: str) -> str:
    """Return the condition reason of a failure that a restart would repeat.

    >>> reason_of_permanent("prepare", "spec.model.path: no such folder"), reason_of_permanent("reward", "exact: boom")
    ('BadConfig', 'RewardFailing')
    """
    if role == "prepare" or message.startswith("spec."):
        return "BadConfig"
    if is_about_full_disk(message):
        return "StorageFull"
    return "RewardFailing" if role == "reward" else "WorkerFailed"


def forgive_after_progress(known: Situation) -> Situation:
    """Reset all workers' failure counts after another trained step."""
    report = known.report
    if report is None or report.step <= known.memory.step:
        return known
    workers = {
        name: replace(worker, counted=0, uncounted=0, disrupted=0) for name, worker in known.memory.workers.items()
    }
    return known.remembering(step=report.step, workers=workers)


# --- trainer of several nodes: its pods are one worker that restarts as a whole ---------------------------------------


def has_left(pod: PodView) -> bool:
    """Return whether a trainer pod of a node after rank 0's ended normally (released by rank 0) or by disruption."""
    return pod.role == "trainer" and pod.worker > 0 and pod.is_finished and end_of(pod).cause != "failure"


def count_end_of_set(known: Situation, ended: list[PodView]) -> Situation:
    """Count one end for the trainer's set of pods: that of the pod which probably ended the others."""
    ended = [pod for pod in ended if not has_left(pod)]
    new = [pod for pod in ended if known.memory.of_worker(worker_name(pod.key)).pod != pod.uid]
    if new and len(new) == len(ended):
        first = min(new, key=_likely_cause)
        known = count_end(known, first)
        new.remove(first)
    for pod in new:
        name = worker_name(pod.key)
        known = known.remembering_worker(name, replace(known.memory.of_worker(name), pod=pod.uid))
    return known


def _likely_cause(pod: PodView) -> tuple[bool, float, int]:
    """Return a sort key that puts killed or disrupted pods first, and earlier ends before later ones."""
    end = end_of(pod)
    at = pod.terminated.at if pod.terminated else None
    return end.cause == "failure" and end.failure != "killed", at.timestamp() if at else 0.0, pod.worker


def keep_together(known: Situation, due: list[Worker]) -> tuple[list[Worker], Actions]:
    """Return which of the `due` workers may get pods, and the removals of a broken set of trainer pods."""
    if known.spec.roles.trainer.nodes == 1:
        return due, NOTHING
    pods = [pod for pod in known.pods if pod.role == "trainer"]
    ends = any((pod.is_finished and not has_left(pod)) or pod.is_deleting or pod.run != known.run_uid for pod in pods)
    grace = BROKEN_SECONDS if any(pod.is_finished and end_of(pod).cause == "failure" for pod in pods) else None
    to_end = [pod for pod in pods if ends and not pod.is_deleting and (not pod.is_finished or has_left(pod))]
    own = [key for key in due if key[0] == "trainer"]
    times = [worker.not_before for name, worker in known.memory.workers.items() if name.startswith("trainer-")]
    waits = any(at is not None and at > known.now for at in times)
    lacks_some = len(own) + len(pods) < known.spec.roles.trainer.nodes  # refused, or not yet due
    may_begin = [key for key in due if key not in own] if ends or waits or lacks_some else due
    return may_begin, Actions.merged(known.removal_of(pod, grace) for pod in to_end)

"""Reasons why a job is unhealthy, causes before consequences (docs/conditions.md)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from rlhfspec.cluster import names
from rlhfspec.job import RLHFJob
from rlhfspec.messages.loop import GATEWAY
from rlhfspec.operator.deciding.allowed import not_allowed
from rlhfspec.operator.deciding.failures import WHERE, is_about_storage_away
from rlhfspec.operator.deciding.memory import WorkerMemory
from rlhfspec.operator.deciding.observed import PodView, Refusal, Said, worker_name
from rlhfspec.operator.deciding.situation import FRESH_SECONDS, Situation, pods_of
from rlhfspec.operator.making import kueue
from rlhfspec.operator.making.workloads import WORKLOAD_KIND as WORKLOAD
from rlhfspec.worker.exits import is_about_full_disk

READY_SECONDS, FIRST_READY_SECONDS = 60.0, 300.0  # allowed time without readiness, once the job ran and before
_STEADY_WORKER_SECONDS = 30.0  # a worker that failed repeatedly must be ready for this long
PULL_REASONS = {
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
    "RegistryUnavailable",
}  # fmt: skip
CONFIG_REASONS = {"CreateContainerConfigError", "CreateContainerError"}
LOST_REASONS = {"NodeLost", "DeletionByTaintManager"}
# Transient kubelet messages until it may read the pod's mounts.
NOT_YET = re.compile(
    r"failed to sync (secret|configmap) cache|object \S+ not registered|no relationship found between node"
)
ABOUT_VOLUMES = re.compile(r"persistent ?volume|volume node affinity", re.IGNORECASE)
NOT_THERE = re.compile(r'(secret|configmap) "[^"]*" not found|references non-existent (secret|config) key')
# Refusal reasons: the name belongs to a foreign object, or to an older job of the same name.
IN_THE_WAY, LEAVING = "AlreadyExists", "Leaving"
_TROUBLE_MESSAGES = {  # message prefixes, followed by the names of workers
    "BrokerUnavailable": "NATS or Redis does not answer ",
    "RecordUndeliverable": "a record could not be handled, as reported by ",
    "RewardFailing": "a reward fails in ",
    "Stalled": "no progress, as reported for ",
    "StorageFull": "no space is left, as reported by ",
}
Find = Callable[[Situation], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Cause:
    reason: str
    means: str
    todo: str
    find: Find


def finding(known: Situation) -> Said | None:
    """Return why the job is unhealthy: the first matching cause with its first evidence, or None."""
    outcome = known.memory.outcome
    if outcome is not None:
        return Said(outcome.reason, outcome.message) if outcome.type == "Failed" else None
    views = (known.without_gateway(), known) if (GATEWAY.name, 0) in known.wanted else (known,)
    for seen, cause in product(views, CAUSES):  # a gateway's troubles come last, because no run waits for it
        if evidence := list(dict.fromkeys(cause.find(seen))):
            more = f" (and {len(evidence) - 1} more)" if len(evidence) > 1 else ""
            return Said(cause.reason, evidence[0][:900] + more)
    return None


def config_problem(known: Situation) -> str:
    """Return why the job cannot start, or an empty text."""
    last = known.observed.trial
    tried = last.problem if last is not None and last.generation == known.job.generation else ""
    return spec_problem(known) or tried


def spec_problem(known: Situation) -> str:
    """Return the first problem of the job's fields, or an empty text."""
    job = known.job
    if job.job is None:
        return str(job.problems[0]) if job.problems else "the job cannot be read"
    if problem := not_allowed(known):
        return problem
    storage = job.job.spec.storage
    if not (storage.uri or storage.claim or known.settings.claim):
        return (
            "spec.storage.claim: must name a PersistentVolumeClaim of this namespace, unless spec.storage.uri names an "
            "object store: the operator has no default claim"
        )
    if kueue.is_queued(known) and not known.settings.kueue:
        return "spec.scheduling.gang: kueue is not enabled: add it to operator.gang of the operator's chart"
    if (nodes := job.job.spec.roles.trainer.nodes) > 1 and storage.uri:
        return (
            f"spec.roles.trainer.nodes: {nodes}: several nodes need a storage.claim for their common checkpoint folder"
        )
    return _too_many(job.job, known.settings.max_workers)


def _too_many(job: RLHFJob, most: int) -> str:
    replicas = job.spec.roles.generator.replicas
    counts = {names.CONTROL: 1} | pods_of(job)
    counts["generator"] = max(counts["generator"], replicas.max if replicas else 1)
    role = max(counts, key=lambda role: counts[role])
    if sum(counts.values()) <= most:
        return ""
    field = "nodes" if role == "trainer" else "workers"
    return (
        f"spec.roles.{role}.{field}: {counts[role]}, which makes {sum(counts.values())} pods; the operator allows "
        f"{most} per job (jobs.maxWorkers of its chart)"
    )


def all_ready(known: Situation) -> bool:
    pods = [known.by_key.get(key) for key in known.wanted if key[0] != GATEWAY.name]  # no run waits for that
    return bool(pods) and all(pod is not None and pod.ready and not pod.is_deleting for pod in pods)


def _pods(known: Situation) -> Iterator[PodView]:
    """Yield the wanted pods that neither finished nor are being deleted."""
    for key in known.wanted:
        pod = known.by_key.get(key)
        if pod is not None and not pod.is_deleting and not pod.is_finished:
            yield pod


def _down(known: Situation) -> Iterator[tuple[str, WorkerMemory]]:
    """Yield (name, memory) of failed workers that have not been ready again for long enough."""
    for key in known.wanted:
        memory, pod = known.memory.of_worker(worker_name(key)), known.by_key.get(key)
        is_back = pod is not None and pod.ready and pod.uid != memory.pod
        if is_back and pod is not None and memory.num_failures >= 2:
            is_back = known.seconds_since(pod.ready_changed or pod.created) >= _STEADY_WORKER_SECONDS
        if memory.reason and not is_back:
            yield worker_name(key), memory


def _refusals(known: Situation) -> Iterator[Refusal]:
    wanted = {names.pod_name(known.job.name, *key) for key in known.wanted}
    for refusal in known.observed.refusals:
        if refusal.name in known.names_of_gateway and (GATEWAY.name, 0) not in known.wanted:
            continue  # it was switched off
        if refusal.kind not in ("Pod", WORKLOAD) or (
            refusal.name in wanted and refusal.name not in {pod.name for pod in known.pods}
        ):
            yield refusal


def _bad_config(known: Situation) -> Iterator[str]:
    if problem := config_problem(known):
        yield problem
    for refusal in _refusals(known):
        if refusal.reason == IN_THE_WAY:
            yield f"{refusal.kind} {refusal.name} already exists and does not belong to this job: remove it"


def _missing_secret(known: Situation) -> Iterator[str]:
    return (f"{pod.name}: {message}" for pod in _pods(known) for message in _missing(pod))


def _missing(pod: PodView) -> Iterator[str]:
    if pod.phase != "Pending":
        return
    if pod.waiting is not None and pod.waiting.reason in CONFIG_REASONS:
        yield pod.waiting.message
    for warning in _mount_warnings(pod):
        if NOT_THERE.search(warning):
            yield warning


def _mount_warnings(pod: PodView) -> Iterator[str]:
    """Yield mount warnings, latest first; none if the pod has a sandbox, because its mounts then succeeded."""
    if pod.phase != "Pending" or pod.has_sandbox:
        return
    for warning in reversed(pod.warnings):
        if warning.reason in ("FailedMount", "FailedAttachVolume") and not NOT_YET.search(warning.message):
            yield warning.message


def roles_that_lack_ours(known: Situation) -> list[str]:
    """Return the roles whose pods lack a ConfigMap or Secret that the operator creates."""
    config, roles = names.config_name(known.job.name, known.job.uid), list[str]()
    for pod in _pods(known):
        ours = {f'"{config}" not found', f'"{names.secret_name(known.job.name, pod.role, known.job.uid)}" not found'}
        if any(name in message for message in _missing(pod) for name in ours):
            roles.append(pod.role)
    return list(dict.fromkeys(roles))


def _quota(known: Situation) -> Iterator[str]:
    return (f"{r.name}: {r.message}" for r in _refusals(known) if _is_quota(r))


def _refused(known: Situation) -> Iterator[str]:
    other = (r for r in _refusals(known) if not _is_quota(r) and r.reason not in (IN_THE_WAY, LEAVING))
    return (f"{r.kind} {r.name}: {r.message}" for r in other)


def _is_quota(refusal: Refusal) -> bool:
    return "exceeded quota" in refusal.message or "failed quota" in refusal.message


def _image_pull(known: Situation) -> Iterator[str]:
    for pod in _pods(known):
        if pod.waiting is not None and pod.waiting.reason in PULL_REASONS:
            # The kubelet alternates between texts with and without these prefixes; each change would cause a write.
            text = re.sub(r'Back-off pulling image "[^"]*":? ?|ErrImagePull: ', "", pod.waiting.message)
            yield f"{pod.name}: {text or pod.waiting.reason}"


def _storage_unavailable(known: Situation) -> Iterator[str]:
    for pod in _pods(known):
        if pod.unscheduled is not None and ABOUT_VOLUMES.search(pod.unscheduled.message):
            yield f"{pod.name}: {pod.unscheduled.message}"
        yield from (f"{pod.name}: {warning}" for warning in _mount_warnings(pod))
    yield from (f"{name}: {memory.message}" for name, memory in _down(known) if is_about_storage_away(memory.message))


def _unschedulable(known: Situation) -> Iterator[str]:
    for pod in _pods(known):
        if pod.unscheduled is not None:
            lacking = dict.fromkeys(re.findall(r"Insufficient ([\w./-]*\w)", pod.unscheduled.message))
            which = f"no node has enough {', '.join(lacking)}: " if lacking else ""
            yield f"{pod.name}: {which}{pod.unscheduled.message or pod.unscheduled.reason}"


def _node_lost(known: Situation) -> Iterator[str]:
    for pod in known.pods:
        if pod.is_finished or not pod.is_deleting:
            continue
        if known.is_lost(pod) and pod.role == "trainer":
            yield (
                f"{pod.name} is on node {pod.node}, which does not answer. It is not recreated, because it may still "
                "write to the run folder. Bring the node back, or switch the machine off and run "
                f"kubectl delete pod {pod.name} --force"
            )
        elif known.is_lost(pod) or (pod.disruption is not None and pod.disruption.reason in LOST_REASONS):
            yield f"{pod.name} is on node {pod.node}, which does not answer"
    for name, memory in _down(known):
        if memory.reason in LOST_REASONS:
            yield f"{name}: {memory.message or memory.reason}"


def _evicted(known: Situation) -> Iterator[str]:
    for pod in known.pods:
        if pod.disruption is not None and pod.is_deleting and pod.disruption.reason not in LOST_REASONS:
            yield f"{pod.name}: {pod.disruption.message or pod.disruption.reason}"
    for name, memory in _down(known):
        if memory.disrupted and memory.reason not in LOST_REASONS and not memory.num_failures:
            yield f"{name}: {memory.reason}: {memory.message}"


def _storage_full(known: Situation) -> Iterator[str]:
    for name, memory in _down(known):
        if is_about_full_disk(memory.message):
            yield f"{name}: {memory.message}"
    yield from _trouble("StorageFull")(known)


def _out_of_memory(known: Situation) -> Iterator[str]:
    return (f"{name}: {memory.message}" for name, memory in _down(known) if memory.reason == "OOMKilled")


def _trouble(reason: str) -> Find:
    """Return a function that finds troubles with this reason in the report of `control`."""

    def find(known: Situation) -> Iterator[str]:
        for trouble in known.fresh_report.troubles if known.fresh_report else ():
            if trouble.reason == reason:
                workers = ", ".join(trouble.workers) or names.CONTROL
                yield f"{_TROUBLE_MESSAGES[reason]}{workers}; {WHERE}"

    return find


def _broker(known: Situation) -> Iterator[str]:
    if known.observed.broker is not None and known.memory.state == "open":
        yield known.observed.broker.message
    yield from _trouble("BrokerUnavailable")(known)
    for name, memory in _down(known):
        if memory.reason == "Temporary" and not is_about_storage_away(memory.message):
            yield f"{name}: {memory.message}"


def _crash_loop(known: Situation) -> Iterator[str]:
    for name, memory in _down(known):
        if memory.num_failures >= 2:
            yield f"{name}: {memory.num_failures} failures since step {known.memory.step}, the last: {memory.message}"


def _control_silent(known: Situation) -> Iterator[str]:
    since = known.memory.running_since
    if known.memory.state != "open" or since is None:
        return
    at = known.observed.report_at
    since = max(since, at) if at is not None and known.report is not None else since
    since = max(since, known.observed.listening_since or since)
    if known.seconds_since(since) >= FRESH_SECONDS:
        yield f"{names.pod_name(known.job.name, names.CONTROL, 0)} has reported nothing since {since:%H:%M:%S} UTC"


def _not_ready(known: Situation) -> Iterator[str]:
    allowed = FIRST_READY_SECONDS if known.memory.running_since is None else READY_SECONDS
    for name, memory in _down(known):
        yield f"{name}: {memory.message or memory.reason}; it is started again"
    for refusal in _refusals(known):
        if refusal.reason == LEAVING:
            yield f"{refusal.name} of an older job with this name is still terminating"
    for pod in _pods(known):
        if pod.role == names.PREPARE:
            continue
        since = max(pod.created, pod.ready_changed or pod.created)
        if not pod.ready and known.seconds_since(since) >= allowed:
            yield f"{pod.name} is {pod.phase} and not ready since {since:%H:%M:%S} UTC"


CAUSES = (
    Cause(
        "BadConfig",
        "A field of the job is wrong or names a missing object, or a foreign object has a name that the job needs. The "
        "message names it.",
        "Correct the field, or create a new job if the field can no longer be changed. Remove the foreign object. The "
        "job then continues.",
        _bad_config,
    ),
    Cause(
        "Queued",
        "The job waits in a queue of Kueue, or was evicted. The message comes from Kueue.",
        "Wait. If the job requests more than the queue's whole quota: lower roles.ROLE.resources, or raise the quota.",
        kueue.why_it_waits,
    ),
    Cause(
        "MissingSecret",
        "A pod cannot start: a Secret or ConfigMap that it mounts or reads is missing.",
        "Create it. The operator recreates its own (NAME-ROLE-UID, NAME-connections-UID).",
        _missing_secret,
    ),
    Cause(
        "QuotaExceeded",
        "The namespace's ResourceQuota leaves no room for a pod.",
        "Raise the quota, or lower roles.ROLE.resources or workers. The operator tries again every few seconds.",
        _quota,
    ),
    Cause(
        "PodRefused",
        "Pod security, a policy or a webhook refuses an object of the job, or the webhook does not answer.",
        "Read the message. A podTemplate may ask for too much, or a webhook's service may be down.",
        _refused,
    ),
    Cause(
        "ImagePull",
        "A node cannot pull an image.",
        "Check the image's name, the registry, and the pull secret of the chart's values.",
        _image_pull,
    ),
    Cause(
        "StorageUnavailable",
        "The job's volume cannot be mounted (its claim is missing, unbound, or in use elsewhere), or its object store "
        "does not answer.",
        "Run kubectl describe pvc; pods on several nodes need ReadWriteMany. For an object store, check its address "
        "and the network policy.",
        _storage_unavailable,
    ),
    Cause(
        "Unschedulable",
        "No node has room for a pod, or its queue holds it back. The message names the missing resource.",
        "Add nodes, or lower roles.ROLE.resources.",
        _unschedulable,
    ),
    Cause(
        "NodeLost",
        "A node does not answer. Workers are recreated elsewhere; the trainer only once its old pod is gone for "
        "certain.",
        "Bring the node back. For a trainer, follow the message.",
        _node_lost,
    ),
    Cause(
        "Evicted",
        "A pod was evicted, preempted or drained. It is recreated; this does not count as a failure.",
        "Nothing, unless it happens often: then set priorities, or requests that fit.",
        _evicted,
    ),
    Cause(
        "StorageFull",
        "A process could not write: the volume is full.",
        "Enlarge the claim, or remove old run folders.",
        _storage_full,
    ),
    Cause(
        "OOMKilled",
        "A worker took more memory than its limit.",
        "Suspend the job, raise roles.ROLE.resources.limits.memory, resume it. Or create a job with a lower "
        "generation.kvCacheTokens or tokensPerMicroBatch.",
        _out_of_memory,
    ),
    Cause(
        "RewardFailing",
        "A reward source fails. The message names the worker.",
        "Run `kubectl rlhf why NAME`; correct the function or the service.",
        _trouble("RewardFailing"),
    ),
    Cause(
        "BrokerUnavailable",
        "NATS or Redis cannot be reached. Workers wait, and continue afterwards.",
        "Check the servers' pods. For external servers, check the address and the network policy.",
        _broker,
    ),
    Cause(
        "RecordUndeliverable",
        "A record was delivered to its stage repeatedly and never handled.",
        "Read the log of the stage that `kubectl rlhf why` names.",
        _trouble("RecordUndeliverable"),
    ),
    Cause(
        "CrashLoop",
        "A worker failed more than once since the last trained step, and has not been ready for half a minute since.",
        "Read its log: kubectl logs, or `kubectl rlhf logs NAME --role ROLE`.",
        _crash_loop,
    ),
    Cause(
        "Stalled",
        "Every worker waits, a worker is silent, or work takes longer than its deadline. See `kubectl rlhf why`.",
        "Read the log of the worker that the message names.",
        _trouble("Stalled"),
    ),
    Cause(
        "ControlSilent",
        "The job's control has not reported for a minute. The job itself may go on.",
        "Check control's log, and its connection to the operator: network policy, certificate.",
        _control_silent,
    ),
    Cause(
        "PodsNotReady",
        "A worker restarts, or has not been ready for a minute (five before the job first ran).",
        "Run kubectl describe pod and kubectl logs.",
        _not_ready,
    ),
)

# Further reasons: of failed jobs, and of a job that makes the operator fail.
OTHERS = {
    "DeadlineExceeded": (
        "activeDeadlineSeconds or preRunningDeadlineSeconds has passed.",
        "Raise it, or find out what took so long.",
    ),
    "FailurePolicy": ("A worker ended with an exit code whose failurePolicy rule is FailJob.", "Read its log."),
    "WorkerFailed": ("A worker ended with an error that a restart cannot fix (exit code 78).", "Read its log."),
    "OperatorError": (
        "The operator cannot process the job, which did not fail. It retries each minute.",
        "Report the message and the job. Changing the field that the message names may help.",
    ),
}

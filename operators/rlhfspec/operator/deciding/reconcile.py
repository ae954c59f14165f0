"""The operator's one decision: given a job and all that is known of it, what to do now. Pure and idempotent: no clock,
no network, no memory but the job's status, and on its own result it changes nothing more.

    a job's life     prepare -> control and all stages -> the trainer's last step -> Succeeded
    a run            opened; closed for suspension, or to begin anew under the next number
    a worker         its pod is made; when it ended, that is counted in, and it is made again after a while

Example:
    >>> reconcile.__annotations__["return"]
    'ReconcilePlan'
"""

from __future__ import annotations

from datetime import datetime, timedelta

from rlhfspec.cluster import names
from rlhfspec.operator.deciding import runs, status
from rlhfspec.operator.deciding.draft import MOST_AT_ONCE, Delete, Draft, ReconcilePlan, worker_name
from rlhfspec.operator.deciding.failures import count_in, forget_after_progress, is_complete
from rlhfspec.operator.deciding.memory import Memory
from rlhfspec.operator.deciding.observed import ChartSettings, JobView, Observed, PodView, Worker
from rlhfspec.operator.deciding.rank_sets import count_in_set, has_left, keep_together
from rlhfspec.operator.deciding.reasons import all_ready, config_problem, roles_that_lack_ours
from rlhfspec.operator.deciding.times import in_milliseconds
from rlhfspec.operator.deciding.wanted import must_restart, settle_generators, wanted_workers
from rlhfspec.operator.making import kueue, trial
from rlhfspec.operator.making.objects import mounted_by, objects_for

STALE_SECONDS, STALE_AT_MOST_SECONDS = 1.0, 5.0
SEEN_AGAIN_SECONDS = 15.0  # while something goes on, the job is reconciled so often whatever happens


def reconcile(job: JobView, observed: Observed, settings: ChartSettings, now: datetime) -> ReconcilePlan:
    draft = Draft(job, observed, settings, in_milliseconds(now), Memory.of(job.status))
    if job.deleting_since is not None:
        return _deleting(draft)
    if _is_stale(draft):
        return ReconcilePlan(status=dict(job.status), requeue_seconds=STALE_SECONDS)
    problem = config_problem(draft)
    if problem:
        _refuse(draft, problem)
    else:
        _decide(draft)
        if trial.is_due(draft):  # also where the last pod of a run is gone only now: nothing else would bring us back
            draft.trial += trial.pods(draft)
    return _finish(draft)


def _is_stale(draft: Draft) -> bool:
    """There are pods of a run of which the status does not know yet: this is an old copy of the job."""
    new = [pod for pod in draft.pods if draft.seconds_since(pod.created) < STALE_AT_MOST_SECONDS]
    return any(pod.run in runs.next_runs(draft) for pod in new)


def _refuse(draft: Draft, problem: str) -> None:
    """A job with such a problem never starts. One that runs already is left as it is until it is right again."""
    outcome = draft.memory.outcome
    if draft.memory.number == 0:
        if outcome is not None and outcome.message != problem:
            draft.memory.outcome = None  # it was edited, and is wrong in another way
        draft.end("Failed", "BadConfig", problem)


def _decide(draft: Draft) -> None:
    runs.reopen(draft)
    forget_after_progress(draft)
    _look_at_ends(draft)
    _look_at_deadlines(draft)
    if draft.memory.outcome is not None:
        return _over(draft)
    runs.turn(draft)
    if draft.memory.state == "open":
        _look_whether_all_run(draft)  # how many generators there should be depends on it
        settle_generators(draft)
        _keep_workers(draft)
    elif draft.memory.state == "closing":
        runs.take_down(draft, keep_finished=False)
    return None


def _look_at_ends(draft: Draft) -> None:
    """Success first: what else ended meanwhile no longer matters."""
    memory = draft.memory
    if memory.outcome is not None or memory.number == 0 or memory.state == "closed":
        return
    ours = [pod for pod in draft.pods if pod.run == draft.run_uid]
    for pod in filter(is_complete, ours):
        ended = pod.terminated
        draft.end("Succeeded", "Completed", ended.message if ended else "")
    if memory.outcome is not None or memory.state == "closing":
        return  # the others are asked to end
    if draft.spec.roles.trainer.nodes > 1:
        count_in_set(draft, [pod for pod in ours if pod.role == "trainer" and pod.is_finished and not pod.is_deleting])
        ours = [pod for pod in ours if pod.role != "trainer"]
    for pod in sorted(ours, key=lambda pod: pod.key):
        if pod.role == names.PREPARE and pod.phase == "Succeeded":
            memory.prepared = True
        elif pod.is_finished and not pod.is_deleting:
            count_in(draft, pod)


def _look_at_deadlines(draft: Draft) -> None:
    memory, spec = draft.memory, draft.spec
    if memory.outcome is not None or memory.state != "open" or memory.opened is None:
        return
    starting = spec.pre_running_deadline_seconds if memory.running_since is None else None
    active = spec.active_deadline_seconds
    left = None if active is None else active - memory.active_before
    for field, allowed, written in (
        ("preRunningDeadlineSeconds", starting, starting),
        ("activeDeadlineSeconds", left, active),
    ):
        if allowed is None:
            continue
        at = memory.opened + timedelta(seconds=allowed)
        if draft.now >= at:
            draft.end("Failed", "DeadlineExceeded", f"spec.{field}: {written} s are over")
        else:
            draft.requeue_at(at)


def _look_whether_all_run(draft: Draft) -> None:
    memory = draft.memory
    if memory.prepared and memory.running_since is None and all_ready(draft):
        memory.running_since = draft.now


def _over(draft: Draft) -> None:
    """Nothing runs any more; what finished stays, if the job says so."""
    memory = draft.memory
    outcome = memory.outcome
    assert outcome is not None
    policy = draft.spec.deletion_policy
    keep = (policy.succeeded if outcome.type == "Succeeded" else policy.failed) == "keep"
    runs.take_down(draft, keep_finished=keep)
    if not any(pod.is_running for pod in draft.pods):
        runs.close(draft)
        _forget_in_time(draft)


def _forget_in_time(draft: Draft) -> None:
    seconds, ended = draft.spec.ttl_seconds_after_finished, draft.memory.completed
    if seconds is None or ended is None:
        return
    at = ended + timedelta(seconds=seconds)
    if draft.now < at:
        draft.requeue_at(at)
    else:
        draft.delete.append(Delete("RLHFJob", draft.job.name, None, draft.job.uid))


# --- an open run -----------------------------------------------------------------------------------------------------


def _keep_workers(draft: Draft) -> None:
    wanted = wanted_workers(draft)
    due = keep_together(draft, [key for key in wanted if _is_to_be_made(draft, key)])
    if any(draft.is_refused(each.kind, each.name) for each in draft.observed.refusals if each.kind != "Pod"):
        due = []  # what pods mount
    if len(due) > MOST_AT_ONCE:
        draft.requeue_in(0.0)
    draft.create += objects_for(draft, due[:MOST_AT_ONCE])
    if roles := roles_that_lack_ours(draft):
        draft.create += mounted_by(draft, roles)
    if draft.memory.prepared:
        _remove_surplus(draft, set(wanted))


def _is_to_be_made(draft: Draft, key: Worker) -> bool:
    pod = draft.by_key.get(key)
    if pod is not None:
        _look_after(draft, pod)
        return False
    not_before = draft.memory.of_worker(worker_name(key)).restart_not_before
    if not_before is not None and not_before > draft.now:
        draft.requeue_at(not_before)
        return False
    return not draft.is_refused("Pod", names.pod_name(draft.job.name, *key))


def _look_after(draft: Draft, pod: PodView) -> None:
    """A finished one stays, with its logs, until it is to be made again. How it ended is in the status by then."""
    not_before = draft.memory.of_worker(worker_name(pod.key)).restart_not_before
    if pod.is_deleting or pod.run != draft.run_uid or must_restart(draft, pod.role, pod.restart_id):
        draft.remove(pod)
    elif not pod.is_finished or (pod.role == names.PREPARE and draft.memory.prepared) or has_left(pod):
        return
    elif not_before is not None and not_before > draft.now:
        draft.requeue_at(not_before)
    else:
        draft.remove(pod)


def _remove_surplus(draft: Draft, wanted: set[Worker]) -> None:
    """Generators go one at a time, the last first: each hands over what it is at."""
    surplus = [pod for pod in draft.pods if pod.key not in wanted and pod.role != names.PREPARE]
    generators = sorted((pod for pod in surplus if pod.role == "generator"), key=lambda pod: pod.worker)
    for pod in surplus:
        if pod.role != "generator" or pod.is_deleting or pod.is_finished:
            draft.remove(pod)
    if generators and not any(pod.is_deleting for pod in draft.pods if pod.role == "generator"):
        last = generators[-1]
        if not last.is_finished:
            draft.remove(last)


# --- the end ---------------------------------------------------------------------------------------------------------


def _deleting(draft: Draft) -> ReconcilePlan:
    """Somebody else holds it, such as a deletion in the foreground: until it is gone nothing is made any more."""
    if draft.job.leaves_orphans:
        return ReconcilePlan(status=dict(draft.job.status))
    runs.take_down(draft, keep_finished=False)
    if draft.memory.number and not draft.pods:
        runs.close(draft)
    return _finish(draft)


def _finish(draft: Draft) -> ReconcilePlan:
    kueue.settle(draft)
    new, events = status.render(draft)
    if draft.memory.state != "closed":
        draft.requeue_in(SEEN_AGAIN_SECONDS)
    return ReconcilePlan(
        status=new, trial=tuple(draft.trial), create=tuple(draft.create), delete=tuple(draft.delete),
        workload=draft.workload, events=tuple(events), requeue_seconds=draft.requeue,
    )  # fmt: skip

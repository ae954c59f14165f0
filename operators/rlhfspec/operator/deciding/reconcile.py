"""Reconcile decisions for one job.

`reconcile` is a pure, idempotent function whose only memory is the job's status.

    job      prepare -> control and all stages -> the trainer's last step -> Succeeded
    run      opened -> closed for suspension, or to restart under the next number
    worker   pod created -> its end counted -> pod created again after a delay
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta

from rlhfspec.cluster import names
from rlhfspec.messages.loop import GATEWAY
from rlhfspec.operator.deciding import runs, status
from rlhfspec.operator.deciding.failures import (
    count_end,
    count_end_of_set,
    end_of,
    forgive_after_progress,
    has_left,
    is_complete,
    keep_together,
)
from rlhfspec.operator.deciding.memory import Memory
from rlhfspec.operator.deciding.observed import JobView, Observed, PodView, Worker, worker_name
from rlhfspec.operator.deciding.reasons import all_ready, config_problem, roles_that_lack_ours, spec_problem
from rlhfspec.operator.deciding.situation import (
    MOST_AT_ONCE,
    NOTHING,
    Actions,
    Delete,
    ReconcilePlan,
    Situation,
    requeued,
)
from rlhfspec.operator.making import kueue, trial
from rlhfspec.operator.making.objects import mounted_by, objects_for
from rlhfspec.operator.settings import ChartSettings

STALE_SECONDS, STALE_AT_MOST_SECONDS = 1.0, 5.0
FORGED_SECONDS = 1  # grace of a pod that the operator did not make
SEEN_AGAIN_SECONDS = 15.0  # interval of reconciles while a run is not closed


def reconcile(job: JobView, observed: Observed, settings: ChartSettings, now: datetime) -> ReconcilePlan:
    now = now.replace(microsecond=now.microsecond // 1000 * 1000)  # the precision of the status
    known = Situation(job, observed, settings, now, Memory.of(job.status))
    made = {worker_name(pod.key): pod.uid for pod in known.pods}
    known = known.remembering(made={**known.memory.made, **made})
    if job.deleting_since is not None:
        return _deleting(known)
    if runs.is_stale(known, STALE_AT_MOST_SECONDS):
        return ReconcilePlan(status=dict(job.status), requeue_seconds=STALE_SECONDS)
    if problem := config_problem(known):
        known = _refuse(known, problem)
        return _finish(known, NOTHING if spec_problem(known) else trial.actions(known))
    known, actions = _decide(known)
    return _finish(known, actions + trial.actions(known))  # no event follows the end of a run's last pod


def _refuse(known: Situation, problem: str) -> Situation:
    """Fail a job with an invalid spec, unless it ran before."""
    outcome = known.memory.outcome
    if known.memory.number:
        return known
    if outcome is not None and outcome.message != problem:
        known = known.remembering(outcome=None)  # it was edited and has another problem
    return known.ended("Failed", "BadConfig", problem)


def _decide(known: Situation) -> tuple[Situation, Actions]:
    known = _look_at_ends(forgive_after_progress(runs.reopen(known)))
    known, waits = _look_at_deadlines(known)
    if known.memory.outcome is not None:
        known, actions = _over(known)
        return known, waits + actions
    known = runs.turn(known)
    if known.memory.state == "open":
        known = runs.settle_generators(_look_whether_all_run(known))
        return known, waits + _keep_workers(known)
    if known.memory.state == "closing":
        return known, waits + runs.take_down(known, keep_finished=False)
    return known, waits


def _look_at_ends(known: Situation) -> Situation:
    """Return the situation with ended pods counted, or with the job's success."""
    memory = known.memory
    if memory.outcome is not None or memory.number == 0 or memory.state == "closed":
        return known
    ours = [pod for pod in known.pods if pod.run == known.run_uid]
    complete = next(filter(is_complete, ours), None)
    if complete is not None:
        return known.ended("Succeeded", "Completed", end_of(complete).message)
    if memory.state == "closing":
        return known  # its pods are expected to end
    ended = [pod for pod in ours if pod.is_finished and not pod.is_deleting]
    if known.spec.roles.trainer.nodes > 1:
        known = count_end_of_set(known, [pod for pod in ended if pod.role == "trainer"])
        ended = [pod for pod in ended if pod.role != "trainer"]
    for pod in sorted(ended, key=lambda pod: pod.key):
        if pod.role != names.PREPARE or pod.phase != "Succeeded":
            known = count_end(known, pod)
    is_prepared = any(pod.role == names.PREPARE and pod.phase == "Succeeded" for pod in ours)
    return known.remembering(prepared=True) if is_prepared else known


def _look_at_deadlines(known: Situation) -> tuple[Situation, Actions]:
    memory, spec = known.memory, known.spec
    if memory.outcome is not None or memory.state != "open" or memory.opened is None:
        return known, NOTHING
    starting = spec.pre_running_deadline_seconds if memory.running_since is None else None
    active = spec.active_deadline_seconds
    left = None if active is None else active - memory.active_before
    waits = NOTHING
    for field, allowed, written in (
        ("preRunningDeadlineSeconds", starting, starting),
        ("activeDeadlineSeconds", left, active),
    ):
        if allowed is None:
            continue
        at = memory.opened + timedelta(seconds=allowed)
        if known.now >= at:
            known = known.ended("Failed", "DeadlineExceeded", f"spec.{field}: {written} s have passed")
        else:
            waits += known.requeued_at(at)
    return known, waits


def _look_whether_all_run(known: Situation) -> Situation:
    memory = known.memory
    is_new = memory.prepared and memory.running_since is None and all_ready(known)
    return known.remembering(running_since=known.now) if is_new else known


def _over(known: Situation) -> tuple[Situation, Actions]:
    """Remove the pods of a job with an outcome, as its deletion policy requires."""
    outcome, policy = known.memory.outcome, known.spec.deletion_policy
    assert outcome is not None
    keep = (policy.succeeded if outcome.type == "Succeeded" else policy.failed) == "keep"
    actions = runs.take_down(known, keep_finished=keep)
    if any(pod.is_running for pod in known.pods):
        return known, actions
    return runs.close(known), actions + _forget_in_time(known)


def _forget_in_time(known: Situation) -> Actions:
    seconds, ended = known.spec.ttl_seconds_after_finished, known.memory.completed
    if seconds is None or ended is None:
        return NOTHING
    at = ended + timedelta(seconds=seconds)
    if known.now < at:
        return known.requeued_at(at)
    return Actions(delete=(Delete("RLHFJob", known.job.name, None, known.job.uid),))


def _keep_workers(known: Situation) -> Actions:
    taken = {pod.key for pod in known.observed.pods}  # also by forged pods, until they are removed
    missing = {key: _seconds_before_made(known, key) for key in known.wanted if key not in taken}
    due, ends = keep_together(known, [key for key, seconds in missing.items() if not seconds])
    waits = [seconds for seconds in missing.values() if seconds]
    # Mounted objects come before pods.
    others = (each for each in known.observed.refusals if each.name not in known.names_of_gateway)
    refused = [known.refused_seconds(each.kind, each.name) for each in others if each.kind != "Pod"]
    if any(refused):
        due, waits = [], [*waits, *filter(None, refused)]
    if len(due) > MOST_AT_ONCE:
        waits.append(0.0)
    created = objects_for(known, due[:MOST_AT_ONCE])
    if roles := roles_that_lack_ours(known):
        created += mounted_by(known, roles)
    kept = (known.by_key[key] for key in known.wanted if key in known.by_key)
    return Actions.merged(
        [
            *map(requeued, waits),
            *(_look_after(known, pod) for pod in kept),
            ends,
            Actions(create=tuple(created)),
            *(known.removal_of(pod) for pod in _surplus(known)),
        ]
    )


def _seconds_before_made(known: Situation, key: Worker) -> float:
    not_before = known.memory.of_worker(worker_name(key)).not_before
    if not_before is not None and not_before > known.now:
        return (not_before - known.now).total_seconds()
    needed = known.names_of_gateway if key[0] == GATEWAY.name else {names.pod_name(known.job.name, *key)}
    refused = (each for each in known.observed.refusals if each.name in needed)
    return max((known.refused_seconds(each.kind, each.name) for each in refused), default=0.0)


def _look_after(known: Situation, pod: PodView) -> Actions:
    """Remove a pod that must restart; a finished pod stays, with its logs, until its worker's restart is due."""
    not_before = known.memory.of_worker(worker_name(pod.key)).not_before
    if pod.is_deleting or pod.run != known.run_uid or _must_restart(known, pod):
        return known.removal_of(pod)
    if not pod.is_finished or (pod.role == names.PREPARE and known.memory.prepared) or has_left(pod):
        return NOTHING
    if not_before is not None and not_before > known.now:
        return known.requeued_at(not_before)
    return known.removal_of(pod)


def _must_restart(known: Situation, pod: PodView) -> bool:
    restart = known.spec.restart
    return pod.role in restart.roles and restart.id not in ("", pod.restart_id)


def _surplus(known: Situation) -> Iterator[PodView]:
    """Yield unwanted pods, but running generators one at a time because each hands over sequences."""
    if not known.memory.prepared:
        return
    wanted = set(known.wanted)
    surplus = [pod for pod in known.pods if pod.key not in wanted and pod.role != names.PREPARE]
    generators = [pod for pod in surplus if pod.role == "generator"]
    for pod in surplus:
        if pod.role != "generator" or pod.is_deleting or pod.is_finished:
            yield pod
    if generators and not any(pod.is_deleting for pod in known.pods if pod.role == "generator"):
        last = max(generators, key=lambda pod: pod.worker)
        if not last.is_finished:
            yield last


def _deleting(known: Situation) -> ReconcilePlan:
    """Take down a job that is being deleted."""
    if known.job.leaves_orphans:
        return ReconcilePlan(status=dict(known.job.status))
    actions = runs.take_down(known, keep_finished=False)
    return _finish(runs.close(known) if known.memory.number and not known.pods else known, actions)


def _remove_forged(known: Situation) -> Iterator[Actions]:
    """Yield removals of forged pods, delayed because another replica's status may still confirm their uids."""
    for pod in known.observed.pods:
        if not known.is_made(pod):
            at = pod.created + timedelta(seconds=STALE_AT_MOST_SECONDS)
            yield known.removal_of(pod, FORGED_SECONDS) if known.now >= at else known.requeued_at(at)


def _finish(known: Situation, actions: Actions) -> ReconcilePlan:
    new, events = status.render(known)
    actions += Actions.merged(_remove_forged(known))
    actions += kueue.settle(known)
    if known.memory.state != "closed":
        actions += requeued(SEEN_AGAIN_SECONDS)
    if len(actions.delete) > MOST_AT_ONCE:
        actions = replace(actions, delete=actions.delete[:MOST_AT_ONCE]) + requeued(0.0)
    return ReconcilePlan(status=new, events=tuple(events), **vars(actions))

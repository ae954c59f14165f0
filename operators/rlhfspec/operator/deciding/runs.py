"""A job's runs: opened, closed for suspension or to begin anew."""

from __future__ import annotations

from rlhfspec.cluster import names
from rlhfspec.messages.loop import workers_of
from rlhfspec.operator.deciding.draft import Draft
from rlhfspec.operator.deciding.wanted import whole_restart_is_wanted
from rlhfspec.operator.making import kueue, trial
from rlhfspec.operator.making.pods import trainer_seconds

STOP_SECONDS = 30  # for all but the trainer, where no worker is left to hand anything to


def turn(draft: Draft) -> None:
    """open -> closing -> closed -> open: the next run. Within one reconcile as far as it goes."""
    memory = draft.memory
    if memory.state == "open" and (draft.spec.suspend or whole_restart_is_wanted(draft) or kueue.withdraws(draft)):
        memory.state = "closing"
    if memory.state == "closed" and memory.number and draft.pods:
        memory.state = "closing"  # made just before the end, and not seen then
    if memory.state == "closing" and not draft.pods:
        close(draft)
    if memory.state == "closed" and not draft.spec.suspend and trial.is_passed(draft) and kueue.admits(draft):
        _open(draft)


def close(draft: Draft) -> None:
    memory = draft.memory
    if memory.number and memory.state != "closed" and memory.opened is not None:
        memory.active_before += draft.seconds_since(memory.opened)
    memory.state, memory.opened, memory.running_since = "closed", None, None


def _open(draft: Draft) -> None:
    memory = draft.memory
    memory.number += 1
    memory.state, memory.prepared = "open", False
    memory.opened, memory.running_since = draft.now, None
    memory.restart_id = draft.spec.restart.id
    memory.workers.clear()
    memory.placed = kueue.places(draft)
    memory.asked = 0  # the generators that the job itself says
    memory.rebalanced = "rebalancer" in workers_of(draft.job.job) if draft.job.job else False
    memory.started = memory.started or draft.now


def reopen(draft: Draft) -> None:
    """A failed job that somebody asked to begin anew goes on from its last checkpoint."""
    memory = draft.memory
    if memory.outcome is not None and memory.outcome.type == "Failed" and draft.job.job is not None:
        is_mended = draft.never_ran and trial.is_passed(draft)
        if is_mended or (memory.number and whole_restart_is_wanted(draft)):
            memory.outcome = memory.completed = None
            memory.state = "closing" if memory.number else "closed"


def take_down(draft: Draft, *, keep_finished: bool) -> None:
    """The trainer's pod first: it ends what it learns and writes a checkpoint while the others are still there."""
    pods = [pod for pod in draft.pods if pod.lingers or not (keep_finished and pod.is_finished)]
    trainers = [pod for pod in pods if pod.role == "trainer" and not pod.is_finished]
    for pod in trainers:
        draft.remove(pod, trainer_seconds(draft) if draft.memory.state == "closing" else None)
    for pod in pods if not trainers else ():
        draft.remove(pod, STOP_SECONDS)


def next_runs(draft: Draft) -> set[str]:
    """Those that a replica which acted before us may have opened since. A pod that says anything else is only
    removed."""
    number = draft.memory.number
    return {names.run_uid(draft.job.uid, later) for later in (number + 1, number + 2)}

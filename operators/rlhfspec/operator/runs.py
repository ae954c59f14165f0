"""A job's runs: opened, closed for suspension or to begin anew, and what becomes of their streams."""

from __future__ import annotations

from rlhfspec.cluster import names
from rlhfspec.loop import workers_of
from rlhfspec.operator.draft import Draft
from rlhfspec.operator.wanted import whole_restart_is_wanted

PURGE_SECONDS = 60.0  # a deleted job waits so long for NATS to come back
PURGE_AGAIN_SECONDS = 15.0
STOP_SECONDS = 30  # for everybody but the trainer, where nobody is left to hand anything to


def turn(draft: Draft) -> None:
    """open -> closing -> closed -> open: the next run. Within one look as far as it goes."""
    memory = draft.memory
    if memory.state == "open" and (draft.spec.suspend or whole_restart_is_wanted(draft)):
        memory.state = "closing"
    if memory.state == "closed" and memory.number and draft.pods:
        memory.state = "closing"  # made just before the end, and not seen then
    if memory.state == "closing" and not draft.pods:
        close(draft)
    if memory.state == "closed" and not draft.spec.suspend:
        _open(draft)


def close(draft: Draft) -> None:
    memory = draft.memory
    if memory.number and memory.state != "closed":
        if memory.opened is not None:
            memory.active_before += draft.seconds_since(memory.opened)
        to_purge(draft, draft.run_uid)
    memory.state, memory.opened, memory.running_since = "closed", None, None


def _open(draft: Draft) -> None:
    memory = draft.memory
    memory.number += 1
    memory.state, memory.prepared = "open", False
    memory.opened, memory.running_since = draft.now, None
    memory.restart_id = draft.spec.restart.id
    memory.workers.clear()
    memory.asked = 0  # the generators that the job itself says
    memory.rebalanced = "rebalancer" in workers_of(draft.job.job) if draft.job.job else False
    memory.started = memory.started or draft.now


def reopen(draft: Draft) -> None:
    """A failed job that somebody asked to begin anew goes on from its last checkpoint."""
    memory = draft.memory
    if memory.outcome is not None and memory.outcome.type == "Failed" and draft.job.job is not None:
        never_ran = memory.number == 0 and memory.outcome.reason == "BadConfig"
        if never_ran or (memory.number and whole_restart_is_wanted(draft)):
            memory.outcome = memory.completed = None
            memory.state = "closing" if memory.number else "closed"


def to_purge(draft: Draft, run: str) -> None:
    memory = draft.memory
    if run not in (*memory.purge, *draft.observed.purged):
        memory.purge = (*memory.purge, run)
    memory.purge_since = memory.purge_since or draft.now


def purge(draft: Draft) -> tuple[str, ...]:
    """What is still to be purged."""
    memory = draft.memory
    memory.purge = tuple(run for run in memory.purge if run not in draft.observed.purged)
    if not memory.purge:
        memory.purge_since = None
        return ()
    draft.look_again_in(PURGE_AGAIN_SECONDS)
    return memory.purge


def take_down(draft: Draft, *, keep_finished: bool) -> None:
    """The trainer's pod first: it ends what it learns and writes a checkpoint while the others are still there."""
    pods = [pod for pod in draft.pods if not (keep_finished and pod.is_finished)]
    trainers = [pod for pod in pods if pod.role == "trainer"]
    for pod in trainers or pods:
        draft.remove(pod, None if pod.role == "trainer" else STOP_SECONDS)


def older_runs(draft: Draft) -> set[str]:
    return {names.run_uid(draft.job.uid, number) for number in range(1, draft.memory.number)}

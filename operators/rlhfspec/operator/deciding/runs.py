"""Opening and closing of a job's runs, and the number of their generators."""

from __future__ import annotations

from rlhfspec.cluster import names
from rlhfspec.messages.loop import workers_of
from rlhfspec.operator.deciding.situation import Actions, Situation
from rlhfspec.operator.making import kueue, trial
from rlhfspec.operator.making.pods import trainer_seconds

STOP_SECONDS = 30  # grace period of all pods but the trainer's, which ends first


def turn(known: Situation) -> Situation:
    """Advance the run from open to closing, to closed, to the next run."""
    memory = known.memory
    if memory.state == "open" and (known.spec.suspend or _restart_is_wanted(known) or kueue.withdraws(known)):
        known = known.remembering(state="closing")
    if memory.state == "closed" and memory.number and known.pods:
        known = known.remembering(state="closing")  # created just before the run closed
    if known.memory.state == "closing" and not known.pods:
        known = close(known)
    if known.memory.state == "closed" and not known.spec.suspend and trial.is_passed(known) and kueue.admits(known):
        known = _open(known)
    return known


def close(known: Situation) -> Situation:
    memory = known.memory
    active = 0.0 if memory.state == "closed" or memory.opened is None else known.seconds_since(memory.opened)
    return known.remembering(
        state="closed", opened=None, running_since=None, active_before=memory.active_before + active
    )


def _open(known: Situation) -> Situation:
    assert known.job.job is not None
    return known.remembering(
        number=known.memory.number + 1,
        generation=known.job.generation,
        state="open",
        prepared=False,
        opened=known.now,
        running_since=None,
        restart_id=known.spec.restart.id,
        workers={},
        made={},
        placed=kueue.places(known),
        asked=0,  # take the number from the spec
        rebalanced="rebalancer" in workers_of(known.job.job),
        started=known.memory.started or known.now,
    )


def reopen(known: Situation) -> Situation:
    """Clear the failure of a job after a restart request or a corrected spec."""
    memory = known.memory
    if memory.outcome is None or memory.outcome.type != "Failed":
        return known
    is_mended = known.never_ran and trial.is_passed(known)
    refused = memory.outcome.reason == "BadConfig" and not memory.prepared
    is_edited = refused and 0 < memory.generation != known.job.generation
    if is_mended or is_edited or (memory.number and _restart_is_wanted(known)):
        return known.remembering(outcome=None, completed=None, state="closing" if memory.number else "closed")
    return known


def _restart_is_wanted(known: Situation) -> bool:
    restart = known.spec.restart
    return not restart.roles and restart.id not in ("", known.memory.restart_id)


def take_down(known: Situation, *, keep_finished: bool) -> Actions:
    """Remove pods, the trainer's first, so that it writes a checkpoint while the others run."""
    pods = [pod for pod in known.pods if pod.lingers or not (keep_finished and pod.is_finished)]
    trainers = [pod for pod in pods if pod.role == "trainer" and not pod.is_finished]
    grace = trainer_seconds(known) if known.memory.state == "closing" else None
    if trainers:
        return Actions.merged(known.removal_of(pod, grace) for pod in trainers)
    return Actions.merged(known.removal_of(pod, STOP_SECONDS) for pod in pods)


def is_stale(known: Situation, new_seconds: float) -> bool:
    """Return whether a pod of a later run, younger than `new_seconds`, shows that this view of the job is stale."""
    number = known.memory.number
    next_runs = {names.run_uid(known.job.uid, later) for later in (number + 1, number + 2)}
    return any(pod.run in next_runs and known.seconds_since(pod.created) < new_seconds for pod in known.observed.pods)


def settle_generators(known: Situation) -> Situation:
    """Set the wanted number of generators from spec and report, within Kueue's quota."""
    generator, memory = known.spec.roles.generator, known.memory
    wanted = memory.generators if memory.asked == generator.workers else generator.workers  # else the job was scaled
    if generator.replicas is None:
        wanted = generator.workers
    else:
        least, most = generator.replicas.min, max(generator.replicas.min, generator.replicas.max)
        wanted = min(max(wanted, least), most)
        report = known.fresh_report
        if report is not None and report.generators_wanted is not None and memory.running_since is not None:
            advice = min(max(report.generators_wanted, least), most)
            wanted = _next_count(known, wanted, advice)
    if (place := memory.placed.get("generator")) is not None:
        wanted = min(wanted, place["count"])
    return known.remembering(generators=wanted, asked=generator.workers)


def _next_count(known: Situation, count: int, advice: int) -> int:
    """Return the next number of generators: `count`, changed by one towards `advice` once all exist."""
    generators = [pod for pod in known.pods if pod.role == "generator"]
    if len(generators) != count or any(pod.is_deleting for pod in generators):
        return count
    if advice >= count and not all(pod.ready for pod in generators):
        return count
    return count + (advice > count) - (advice < count)

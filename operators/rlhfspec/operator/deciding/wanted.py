"""Which workers of a job should run, and how many generators.

Example:
    >>> next_count(2, advice=5, least=1, most=4, is_settled=True)
    3
"""

from __future__ import annotations

from rlhfspec.cluster import names
from rlhfspec.job import RLHFJob
from rlhfspec.messages.loop import workers_of
from rlhfspec.operator.deciding.draft import Draft
from rlhfspec.operator.deciding.observed import Worker


def settle_generators(draft: Draft) -> None:
    """How many should run from now on; never more than have quota of Kueue."""
    _settle(draft)
    if (place := draft.memory.placed.get("generator")) is not None:
        draft.memory.generators = min(draft.memory.generators, place["count"])


def _settle(draft: Draft) -> None:
    """One more or one fewer at a time."""
    memory, generator = draft.memory, draft.spec.roles.generator
    if generator.replicas is None:
        memory.generators = memory.asked = generator.workers
        return
    least, most = generator.replicas.min, max(generator.replicas.min, generator.replicas.max)
    if memory.asked != generator.workers:  # the job began, or somebody scaled it
        memory.asked = memory.generators = generator.workers
    memory.generators = min(max(memory.generators, least), most)
    report = draft.fresh_report
    if report is not None and report.generators_wanted is not None and memory.running_since is not None:
        memory.generators = next_count(
            memory.generators, advice=report.generators_wanted, least=least, most=most, is_settled=_is_settled(draft)
        )


def next_count(now: int, *, advice: int, least: int, most: int, is_settled: bool) -> int:
    """A generator that found no place, or is not ready, is no reason to start another."""
    advice = min(max(advice, least), most)
    if not is_settled:
        return now
    return now + (advice > now) - (advice < now)


def _is_settled(draft: Draft) -> bool:
    """As many are there as should be. One on its way may be taken back."""
    report, generators = draft.fresh_report, [pod for pod in draft.pods if pod.role == "generator"]
    if len(generators) != draft.memory.generators or any(pod.is_deleting for pod in generators):
        return False
    advice = report.generators_wanted if report else None
    return all(pod.ready for pod in generators) or (advice is not None and advice < draft.memory.generators)


def wanted_workers(draft: Draft) -> list[Worker]:
    """Those whose pods should be there now, in the order of the loop."""
    memory = draft.memory
    if memory.outcome is not None or memory.state != "open" or draft.job.job is None:
        return []
    if not memory.prepared:
        return [(names.PREPARE, 0)]
    # asked for by every cause in turn
    known = draft.wanted.get(depends_on := (memory.generators, memory.rebalanced))
    if known is None:
        known = [(role, worker) for role, count in counts_of(draft).items() for worker in range(count)]
        draft.wanted[depends_on] = known
    return known


def pods_of(job: RLHFJob) -> dict[str, int]:
    """How many pods each stage has: a trainer one a node."""
    return workers_of(job) | {"trainer": job.spec.roles.trainer.nodes}


def counts_of(draft: Draft) -> dict[str, int]:
    """Every role that has pods while the run is open and prepared, with how many workers."""
    assert draft.job.job is not None
    counts = {names.CONTROL: 1} | pods_of(draft.job.job) | {"generator": draft.memory.generators}
    counts.pop("rebalancer", None)
    return counts | ({"rebalancer": 1} if draft.memory.rebalanced else {})


def restart_id_of(draft: Draft, role: str) -> str:
    """Under which a pod of this role is started."""
    restart = draft.spec.restart
    return restart.id if not restart.roles or role in restart.roles else ""


def must_restart(draft: Draft, role: str, restart_id: str) -> bool:
    """Somebody asked for these roles since. The whole job restarts by a new run instead."""
    restart = draft.spec.restart
    return role in restart.roles and restart.id not in ("", restart_id)


def whole_restart_is_wanted(draft: Draft) -> bool:
    restart = draft.spec.restart
    return not restart.roles and restart.id not in ("", draft.memory.restart_id)

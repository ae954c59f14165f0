from __future__ import annotations

import os

from rlhfspec.common.ranks import set_of_ranks
from rlhfspec.job import RLHFJob
from rlhfspec.messages.loop import workers_of
from rlhfspec.supervisor.child import Child, Starter
from rlhfspec.supervisor.gpus import Dealt
from rlhfspec.supervisor.place import ProcessPlace


def make_children(
    job: RLHFJob, place: ProcessPlace, gpus: Dealt, starter: Starter, *, is_served: bool = False
) -> list[Child]:
    return [
        Child(
            stage,
            worker,
            arguments_of(job, place, gpus, stage, worker),
            starter,
            log=place.logs / f"{stage}-{worker}.jsonl",
            activity=place.activity / f"{stage}-{worker}",
        )
        for stage, count in workers_of(job, is_served=is_served).items()
        for worker in range(count)
    ]


def arguments_of(job: RLHFJob, place: ProcessPlace, gpus: Dealt, stage: str, worker: int) -> list[str]:
    arguments = ["-m", f"rlhfspec.{stage}", "--connections", str(place.connections_file), "--worker", str(worker)]
    if stage == "generator" and (threads := _threads_of_a_generator(job)) is not None:
        arguments += ["--threads", str(threads)]
    dealt = ["--gpus", ",".join(gpus[stage, worker])] if (stage, worker) in gpus else []
    trainer = job.spec.roles.trainer
    if stage == "trainer" and trainer.ranks > 1:
        return [*set_of_ranks(trainer.ranks_per_node, nodes=trainer.nodes), *dealt, *arguments]
    return [*arguments, *dealt]


def _threads_of_a_generator(job: RLHFJob) -> int | None:
    """Return the threads per generator, or None for torch's default."""
    count = workers_of(job)["generator"] * job.spec.num_processes("generator")
    if count == 1:
        return None
    share = max(1, len(os.sched_getaffinity(0)) // count)
    told = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(told)) if told.isdecimal() else share

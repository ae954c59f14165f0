from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import cycle

from rlhfspec.errors import InvalidRequest
from rlhfspec.job import RLHFJob
from rlhfspec.job.rewards import ModelSource
from rlhfspec.messages.loop import workers_of

Dealt = dict[tuple[str, int], list[str]]  # (stage, worker) -> the GPUs of its processes, one each


def deal(job: RLHFJob, gpus: Sequence[str]) -> Dealt:
    """Return a GPU per process, or {} if none are to be assigned. Raise InvalidRequest if too few and not shared."""
    spec = job.spec
    if not gpus or spec.device not in ("auto", "cuda") or spec.training.exact_on_policy:
        return {}
    wanting = list(_wanting(job))
    if len(wanting) > len(gpus) and not spec.share_gpus:
        counts = ", ".join(f"{stage} {count}" for stage, count in Counter(stage for stage, _ in wanting).items())
        problem = f"{len(wanting)} processes need a GPU each ({counts}), but there are {len(gpus)}"
        raise InvalidRequest("spec.shareGpus", spec.share_gpus, f"{problem}; set it to true to share GPUs")
    dealt: Dealt = {}
    for key, gpu in zip(wanting, cycle(gpus), strict=False):
        dealt.setdefault(key, []).append(gpu)
    return dealt


def _wanting(job: RLHFJob) -> Iterator[tuple[str, int]]:
    workers, spec = workers_of(job), job.spec
    yield from [("trainer", 0)] * spec.num_processes("trainer")
    has_reward_model = any(isinstance(source, ModelSource) for source in spec.rewards.sources)
    for stage in ("generator", "reference", "critic", *(["reward"] if has_reward_model else [])):
        for worker in range(workers.get(stage, 0)):
            yield from [(stage, worker)] * spec.num_processes(stage)

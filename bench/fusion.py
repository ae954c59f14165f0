"""Measure the speedup from training PPO's actor and critic at the same time.

    export RLHFSPEC_RANKS_SECRET=$(openssl rand -hex 32)
    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 2 bench/fusion.py

The same synthetic step (4 prompts x 4 samples of 256 tokens) is trained in turns on two ranks: with both models sharded
by FSDP, and with one model per rank. Ratios are medians over turns and need two quiet cores. Digests of ways with equal
threads per model must match.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from training import GROUP, NUM_SAMPLES, NUM_TOKENS, rollouts, take_turns

from rlhfspec.bench.stepping.step import StepSettings, job_of
from rlhfspec.common.ranks.group import Ranks
from rlhfspec.common.ranks.meeting import joined
from rlhfspec.job import RLHFJob
from rlhfspec.tiny.corpus import prompts
from rlhfspec.tiny.models import ensure
from rlhfspec.training.learning.learner import Learner
from rlhfspec.training.modeling.digest import digest

SHARES, APART = "FSDP's two ranks", "a model a rank"


def learners_of(job: dict[str, Any], ranks: Ranks) -> dict[str, Learner]:
    def learner(fuse: str) -> Learner:
        job["spec"]["training"]["fuse"] = fuse
        return Learner.from_spec(RLHFJob.model_validate(job).spec, ranks=ranks, num_threads=1)

    return {SHARES: learner("off"), APART: learner("auto")}


def tell(seconds: dict[str, list[float]], digests: dict[str, tuple[str, str]]) -> None:
    *before, last = seconds
    for way, of_way in seconds.items():
        policy, critic = digests[way]
        print(f"{way:<20} {statistics.median(of_way):6.2f} s a step, policy {policy}, critic {critic}")
    for way in before:
        ratios = sorted(a / b for a, b in zip(seconds[way], seconds[last], strict=True))
        middle = statistics.median(ratios)
        print(f"{way} / {last}: {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}, {len(ratios)} turns)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", default="target", help="wide (77M parameters) or target (3.3M)")
    parser.add_argument("--turns", type=int, default=7)
    given = parser.parse_args()
    model = str(getattr(ensure(given.tiny), given.tiny))
    job = job_of(StepSettings(model=model, draft=model, algorithm="ppo", kl_coefficient=0.05), "off")
    step = rollouts(prompts(NUM_SAMPLES // GROUP, seed=20), GROUP, NUM_TOKENS)
    step = replace(step, values=torch.zeros(NUM_SAMPLES * NUM_TOKENS))
    with joined(timeout_seconds=600.0, silence_seconds=600.0) as ranks:
        learners = learners_of(job, ranks)
        seconds = take_turns(learners, step, given.turns, time.perf_counter)
        digests = {
            way: (digest(of.policy_state())[:12], digest(of.critic_state())[:12]) for way, of in learners.items()
        }
    if ranks.rank == 0:
        tell(seconds, digests)


if __name__ == "__main__":
    main()

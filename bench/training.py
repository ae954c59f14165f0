"""Profile a training step: python bench/training.py [--tiny wide|target] [--dtype bfloat16] [--exact].

One learner trains the same synthetic step several times (4 prompts x 4 samples of 256 tokens, GRPO). Each step prints
seconds, user and system CPU, page faults, and the weights digest, which optimizations must not change. Then torch's
profile is printed by kind of operation.

--sharing compares steps with and without training.sharePrompts: one prompt of several lengths, 16 answers of 48 tokens.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhfspec.bench.stepping.step import StepSettings, job_of
from rlhfspec.job import RLHFJob
from rlhfspec.tiny.corpus import prompts, token_stream
from rlhfspec.tiny.models import ensure
from rlhfspec.training.learning.learner import Learner
from rlhfspec.training.learning.rollouts import Rollouts
from rlhfspec.training.modeling.digest import digest

NUM_SAMPLES, NUM_TOKENS, GROUP = 16, 256, 4
SHARED_BY, ANSWER_TOKENS, PROMPT_TOKENS = 16, 48, (768, 96, 8)
KINDS = {
    "aten::mm": "matrix products",
    "aten::addmm": "matrix products",
    "aten::bmm": "matrix products",
    "aten::_scaled_dot_product": "attention",
    "aten::silu": "activation",
    "aten::mul": "activation",
    "aten::_fused_adam": "optimizer",
}


def rollouts(asked: list[list[int]], group: int, num_tokens: int) -> Rollouts:
    random = torch.Generator().manual_seed(0)
    num_samples = len(asked) * group
    log_probs = -5 * torch.rand(num_samples * num_tokens, generator=random)
    return Rollouts(
        ids=tuple(f"bench/1/{place // group}/{place % group}" for place in range(num_samples)),
        group_index=torch.arange(num_samples) // group,
        lengths=torch.full((num_samples,), num_tokens),
        prompt_token_ids=tuple(tuple(asked[place // group]) for place in range(num_samples)),
        token_ids=torch.randint(200, (num_samples * num_tokens,), generator=random),
        generator_log_probs=log_probs,
        log_probs=log_probs,
        weights_versions=torch.zeros(num_samples * num_tokens, dtype=torch.int64),
        rewards=torch.rand(num_samples, generator=random, dtype=torch.float64),
        reward_components={},
        reference_log_probs=log_probs - 0.1,
        values=None,
        truncated=torch.ones(num_samples, dtype=torch.bool),
    )


def train(learner: Learner, step: Rollouts, num_steps: int) -> None:
    for number in range(1, num_steps + 1):
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        learner.learn(step)
        spent = resource.getrusage(resource.RUSAGE_SELF)
        user, system = spent.ru_utime - before.ru_utime, spent.ru_stime - before.ru_stime
        faults, peak = (spent.ru_minflt - before.ru_minflt) / 1e6, spent.ru_maxrss / 2**20
        print(
            f"step {number}: {time.perf_counter() - began:6.2f} s; processors {user:.2f} s + system {system:.2f} s, "
            f"{faults:.2f}M page faults, peak {peak:.1f} GiB, weights {digest(learner.policy_state())[:12]}",
            flush=True,
        )


def profile(learner: Learner, step: Rollouts) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        learner.learn(step)
    seconds: Counter[str] = Counter()
    for entry in found.key_averages():
        kind = next((kind for start, kind in KINDS.items() if entry.key.startswith(start)), "everything else")
        seconds[kind] += entry.self_cpu_time_total / 1e6
    total = sum(seconds.values())
    for kind, spent in seconds.most_common():
        print(f"{kind:<16} {spent:7.2f} s {spent / total:6.1%}")


def take_turns(
    learners: Mapping[str, Learner], step: Rollouts, num_turns: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return the seconds of each learner's steps by the clock, without the first turn."""
    spent: dict[str, list[float]] = {way: [] for way in learners}
    for turn in range(num_turns + 1):
        for way in list(learners)[:: 1 if turn % 2 else -1]:
            began = clock()
            learners[way].learn(step)
            spent[way].append(clock() - began)
    return {way: of_way[1:] for way, of_way in spent.items()}


def compare_sharing(job: dict[str, Any], num_steps: int) -> None:
    learners = {}
    for way, share in (("copies", False), ("shared", True)):
        job["spec"]["training"]["sharePrompts"] = share
        learners[way] = Learner.from_spec(RLHFJob.model_validate(job).spec)
    for length in PROMPT_TOKENS:
        step = rollouts([token_stream(length, seed=20)], SHARED_BY, ANSWER_TOKENS)
        seconds = take_turns(learners, step, num_steps, time.process_time)
        copies, shared = map(statistics.median, seconds.values())
        ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
        print(f"prompt of {length} tokens: copies {copies:.2f} s, shared {shared:.2f} s, {ratio:.2f} times as fast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", default="wide", help="wide (77M parameters) or target (3.3M)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--exact", action="store_true", help="exactly on-policy: the forward on our kernels")
    parser.add_argument("--sharing", action="store_true", help="with and without training.sharePrompts")
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    model = str(getattr(ensure(given.tiny), given.tiny))
    longest = max(PROMPT_TOKENS) if given.sharing else None
    job = job_of(StepSettings(model=model, draft=model, dtype=given.dtype, num_prompt_tokens=longest), "off")
    job["spec"]["training"]["exactOnPolicy"] = given.exact

    def work() -> None:
        if given.sharing:
            compare_sharing(job, given.steps)
            return
        learner = Learner.from_spec(RLHFJob.model_validate(job).spec)
        step = rollouts(prompts(NUM_SAMPLES // GROUP, seed=20), GROUP, NUM_TOKENS)
        train(learner, step, given.steps)
        profile(learner, step)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()

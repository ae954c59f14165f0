"""What a drafter that learns costs where that cannot pay: python bench/learning_costs.py [--repeats 5] [--tokens 2000].

Five small jobs of random models, most of which cannot gain anything, each generated with `learning: auto` and `off` in
turns on one thread; seconds are those of the CPU. `calls`: the share of the time that went into the calls of learning,
as they were timed from outside; `on / off`: the median of the pairs, as noisy as the machine is. The tokens are the
same. A step of these models takes a millisecond or two, so what learning does in every step weighs more than anywhere.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from rlhfspec.engine import Engine, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.engine.loading import make_engine
from rlhfspec.tiny import perturbed, random_model

VOCAB = 1024
CHAIN = DraftPlan(drafter="model", depth=4)
JOBS: dict[
    str, tuple[float | None, Any, int]
] = {  # noise on the policy that drafts (None: no kin of it), mode, sequences
    "repeats itself, suffix drafts": (0.3, "suffix", 8),
    "a draft that fits already": (0.0, CHAIN, 8),
    "a draft of noise, adaptive": (None, "adaptive", 8),
    "64 sequences, adaptive": (0.5, "adaptive", 64),
    "a draft that can learn": (0.5, CHAIN, 8),
}
CALLS = ("start", "forget", "record", "learn", "stepped", "follow")


def policy() -> Any:
    return random_model("llama", seed=3, vocab_size=VOCAB, num_layers=4)


def engine_of(noise: float | None, mode: Any, learning: str) -> Engine:
    model = policy()
    draft = random_model("llama", seed=9, vocab_size=VOCAB) if noise is None else perturbed(model, noise)
    config = EngineConfig(
        max_sequences=64, max_context=512, num_threads=1, profile=False, speculation=mode, learning=learning
    )
    return make_engine(model, config, draft=copy.deepcopy(draft))


def timed(engine: Engine) -> list[float]:
    """Seconds of the CPU in calls of its learning, as they are made."""
    spent: list[float] = []

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*arguments: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return call(*arguments, **named)
            finally:
                spent.append(time.process_time() - began)

        return timed_call

    for name in CALLS:
        setattr(engine.learning, name, around(getattr(engine.learning, name)))
    return spent


def generate(engine: Engine, num_sequences: int, num_tokens: int, seed: int) -> tuple[float, list[tuple[int, ...]]]:
    params = SamplingParams(max_tokens=min(num_tokens, 400), ignore_eos=True)
    began, tokens = time.process_time(), []
    for first in range(0, num_tokens, 400):
        prompts = [[1 + (7 * (seed + first + row)) % (VOCAB - 1)] * 16 for row in range(num_sequences)]
        seeds = range(seed + first * 100, seed + first * 100 + num_sequences)
        tokens += [done.token_ids for done in engine.generate(prompts, params, seeds=seeds)]
    return time.process_time() - began, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2000, help="of each sequence in a run")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'job':<32}{'off':>9}{'calls':>8}{'on / off':>10}  tokens learnt from")
    for name, (noise, mode, num_sequences) in JOBS.items():
        on, off = engine_of(noise, mode, "auto"), engine_of(noise, mode, "off")
        calls, ratios, whole = timed(on), [], 0.0
        for number in range(given.repeats + 1):  # the first is a warm-up
            took = {}
            for engine in (on, off) if number % 2 else (off, on):
                took[engine] = generate(engine, num_sequences, given.tokens if number else 100, 10_000 * number)
            assert took[on][1] == took[off][1], "a drafter changed a token"
            whole += took[on][0]
            ratios += [took[on][0] / took[off][0]] if number else []
        report = on.stats().learning
        assert report is not None
        ratio = statistics.median(ratios)
        share, seconds = sum(calls) / whole, took[off][0]
        print(f"{name:<32}{seconds:>7.1f} s{share:>8.1%}{ratio:>10.3f}  {report.num_tokens:,}", flush=True)


if __name__ == "__main__":
    main()

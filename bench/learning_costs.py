"""Measure the cost of a learning drafter on jobs where it cannot help.

    python bench/learning_costs.py [--seconds 60] [--jobs 1 2]

Five small jobs of random models run with `learning: auto` and `off` in short alternating rounds on one thread.
Strategies are fixed, because `adaptive` chooses by its own clock. `on / off` is the geometric mean ratio of CPU seconds
with its 95 % interval; `calls` is the share of time in learning calls.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch

from rlhfspec.bench.ratios import paired
from rlhfspec.engine import Engine, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.tiny import perturbed, random_model

VOCAB = 1024
CHAIN = DraftPlan(drafter="model", depth=4)
# noise on the policy to make the draft (None: an unrelated model), plan, sequences
JOBS: dict[str, tuple[float | None, DraftPlan, int]] = {
    "suffix drafts, the model never": (0.3, DraftPlan(drafter="suffix", depth=4), 8),
    "a draft that fits already": (0.0, CHAIN, 8),
    "a draft of noise": (None, CHAIN, 8),
    "64 sequences": (0.5, CHAIN, 64),
    "a draft that can learn": (0.5, CHAIN, 8),
}
CALLS = ("start", "forget", "record", "stepped")


def engine_of(noise: float | None, plan: DraftPlan, learning: str) -> Engine:
    model = random_model("llama", seed=3, vocab_size=VOCAB, num_layers=4)
    draft = random_model("llama", seed=9, vocab_size=VOCAB) if noise is None else perturbed(model, noise)
    config = EngineConfig(
        max_sequences=64, max_context=512, num_threads=1, profile=False, speculation=plan, learning=learning
    )
    return make_engine(model, config, draft=copy.deepcopy(draft))


def timed(engine: Engine, spent: list[float]) -> None:
    """Wrap the engine's learning calls so that their CPU seconds are appended to `spent`."""

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


def generate(engine: Engine, num_sequences: int, num_tokens: int, number: int) -> tuple[float, list[tuple[int, ...]]]:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    prompts = [[1 + (7 * (100 * number + row)) % (VOCAB - 1)] * 16 for row in range(num_sequences)]
    seeds = range(1000 * number, 1000 * number + num_sequences)
    began = time.process_time()
    tokens = [done.token_ids for done in engine.generate(prompts, params, seeds=seeds)]
    return time.process_time() - began, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each job, with learning")
    parser.add_argument("--tokens", type=int, default=100, help="of each sequence in a round")
    parser.add_argument("--jobs", type=int, nargs="+", default=range(1, len(JOBS) + 1))
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'job':<32}{'ms a step':>10}{'calls':>8}{'on / off':>20}{'rounds':>8}  tokens learnt from")
    for name, (noise, plan, num_sequences) in [list(JOBS.items())[job - 1] for job in given.jobs]:
        seconds: dict[str, list[float]] = {"auto": [], "off": []}
        num_steps = num_learnt = 0
        calls: list[float] = []
        for order in (("auto", "off"), ("off", "auto")):  # the order of creation changes the memory layout
            engines = {learning: engine_of(noise, plan, learning) for learning in order}
            for engine in engines.values():
                generate(engine, num_sequences, given.tokens, 0)
            timed(engines["auto"], calls)
            num_steps -= engines["off"].stats().num_steps
            until = sum(seconds["auto"]) + given.seconds / 2
            while sum(seconds["auto"]) < until:
                number, tokens = len(seconds["off"]) + 1, []
                for learning in order if number % 2 else reversed(order):
                    took, made = generate(engines[learning], num_sequences, given.tokens, number)
                    seconds[learning].append(took)
                    tokens.append(made)
                assert tokens[0] == tokens[1], "a drafter changed a token"
            num_steps += engines["off"].stats().num_steps
            report = engines["auto"].learning.report
            num_learnt += report.num_tokens
        ratio = paired(seconds["auto"], seconds["off"])
        told = f"{ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"
        step, share = 1e3 * sum(seconds["off"]) / num_steps, sum(calls) / sum(seconds["auto"])
        print(f"{name:<32}{step:>10.2f}{share:>8.2%}{told:>20}{number:>8}  {num_learnt:,}", flush=True)


if __name__ == "__main__":
    main()

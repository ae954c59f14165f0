"""Compare tokens per CPU second of the engine, vLLM under the law, and vLLM's own sampler without log-probs.

All use one thread, float32, and no drafts or kept prefixes. Rounds take turns. Printed are medians, and the geometric
mean of the paired law / sampler ratios with its 95 % interval. Use many short rounds: on a shared machine a single one
is off by a third.

python bench/engines.py [--model tiny:sums] [--pairs 60] [--sequences 1 8 32] [--tokens 64]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from rlhfspec.bench.generating.vllm_engine import opened
from rlhfspec.bench.ratios import paired
from rlhfspec.bench.worker import Worker, vllm_command
from rlhfspec.engine.base import EngineProtocol, Request
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.params import SamplingParams
from rlhfspec.engine.vllm.finding import INSTALL_VLLM, find_python
from rlhfspec.huggingface.loading import load_model
from rlhfspec.tiny import resolve

Round = Callable[[list[list[int]]], tuple[int, float]]  # prompts -> (tokens, CPU seconds)
MAX_CONTEXT = 256


def seconds_of(pid: int) -> float:
    """Return the CPU seconds that all threads of a process have used so far."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in threads) / 1e9


def round_of(engine: EngineProtocol, num_tokens: int, pid: int | None = None) -> Round:
    names = itertools.count()

    def run(prompts: list[list[int]]) -> tuple[int, float]:
        before = seconds_of(os.getpid()) + (seconds_of(pid) if pid else 0.0)
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        for prompt in prompts:
            name = next(names)
            engine.submit(Request(id=f"{name}", prompt_token_ids=tuple(prompt), params=params, seed=name))
        count = 0
        while engine.has_work:
            count += sum(len(done.token_ids) for done in engine.step().finished)
        return count, seconds_of(os.getpid()) + (seconds_of(pid) if pid else 0.0) - before

    return run


def round_of_rival(worker: Worker, num_tokens: int) -> Round:
    pid = worker._process.pid

    def run(prompts: list[list[int]]) -> tuple[int, float]:
        before = seconds_of(pid)
        answer = worker.ask("run", prompts=prompts, max_tokens=[num_tokens] * len(prompts))
        return answer["num_tokens"], seconds_of(pid) - before

    return run


def measure(args: argparse.Namespace, python: Path, num_sequences: int) -> None:
    model = str(resolve(args.model) if args.model.startswith("tiny:") else args.model)
    draw = np.random.default_rng(0)
    with ExitStack() as leaving:
        config = EngineConfig(
            speculation="off", profile=False, num_threads=1, max_sequences=num_sequences, max_context=MAX_CONTEXT
        )
        sizes = {"max_context": MAX_CONTEXT, "max_sequences": num_sequences, "dtype": "float32", "num_threads": 1}
        under_law = opened(model, python, **sizes)
        leaving.callback(under_law.close)
        rival = leaving.enter_context(Worker.start(vllm_command(python), num_threads=1))
        rival.ask(
            "load", target=model, dtype="float32", max_context=MAX_CONTEXT, max_sequences=num_sequences
        )  # fmt: skip
        rounds = {
            "own": round_of(make_engine(load_model(model), config), args.tokens),
            "vllm under the law": round_of(under_law, args.tokens, under_law.pid),
            "vllm's own sampler": round_of_rival(rival, args.tokens),
        }
        speeds: dict[str, list[float]] = {name: [] for name in rounds}
        for index in range(args.pairs + 1):
            prompts = draw.integers(3, 100, (num_sequences, 32)).tolist()
            for name in rounds if index % 2 else reversed(rounds):
                tokens, seconds = rounds[name](prompts)
                if index:  # the first warms up
                    speeds[name].append(tokens / seconds)
    ratio = paired(speeds["vllm under the law"], speeds["vllm's own sampler"])
    cells = " | ".join(f"{statistics.median(each):,.0f}" for each in speeds.values())
    print(f"| {num_sequences} | {cells} | {ratio} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny:sums")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    python = find_python(None)
    if python is None:
        raise SystemExit(INSTALL_VLLM)
    print("| sequences | own | vllm under the law | vllm's own sampler | law / sampler |\n|---|---|---|---|---|")
    for num_sequences in args.sequences:
        measure(args, python, num_sequences)


if __name__ == "__main__":
    main()

"""Measure the costs of KV memory that is mapped on demand, and of copied tails of shared prompts.

    python bench/kv_memory.py [--pairs 9] [--rows 32] [--tokens 96]
    python bench/kv_memory.py --tails 8 [--group 16] [--rows 128] [--tokens 32]

The first command compares it with KV memory written at creation, on the same steps of two engines of the 3.3M model,
and prints resident KV memory at the start and after steps of several sizes. Linux only.

The second compares copied tails with tails recomputed by each sibling, for prompts of `--tails` tokens. Both print the
median ratio of CPU seconds over alternating pairs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch

from rlhfspec.engine import Engine, SamplingParams
from rlhfspec.engine.kv.cache import resident_bytes
from rlhfspec.engine.kv.prefixes import Found, Prefixes
from rlhfspec.engine.scheduling.sequences import Sequence
from rlhfspec.tiny import ensure
from rlhfspec.tiny.library import prompts

MEGABYTE = 1 << 20


def written_at_once(*, dtype: torch.dtype, device: torch.device, **shape: int) -> torch.Tensor:
    """Allocate zeroed KV memory that is written at creation, not mapped on demand."""
    num_blocks, layers, size, heads, dim = (
        shape[name] for name in ("num_blocks", "num_layers", "block_size", "num_kv_heads", "head_dim")
    )
    return torch.zeros((num_blocks, layers, 2, size, heads, dim), dtype=dtype, device=device)


@contextmanager
def the_old_way() -> Iterator[None]:
    with (
        patch("rlhfspec.engine.forward.runner.new_kv", written_at_once),
        patch("rlhfspec.engine.kv.cache._advise_unused"),
    ):
        yield


def make() -> Engine:
    return Engine.from_pretrained(ensure("target").target, speculation="off", num_threads=1)


def step(engine: Engine, number: int, rows: int, tokens: int) -> float:
    """Run one step and return its CPU seconds."""
    texts = [prompt for prompt in prompts(rows // 8, seed=number) for _ in range(8)]
    began = time.process_time()
    engine.generate(texts, SamplingParams(max_tokens=tokens, ignore_eos=True))
    engine.scheduler.drop_kv()
    return time.process_time() - began


def without_tails(self: Prefixes, sequence: Sequence) -> Found:
    """Return the cached prefix without the tail beyond its whole blocks."""
    found = find(self, sequence)
    return Found(blocks=found.blocks) if len(found.blocks) == len(sequence.prefix.hashes) else found


find = Prefixes.find


def tails(length: int, group: int, rows: int, tokens: int, pairs: int) -> None:
    engine, ratios = make(), []
    for number in range(pairs):
        rng, seconds, done = np.random.default_rng(number), {}, []
        prompts = [prompt for _ in range(rows // group) for prompt in [rng.integers(0, 250, length).tolist()] * group]
        params = [SamplingParams(max_tokens=int(n), ignore_eos=True) for n in rng.integers(tokens // 2, tokens, rows)]
        for way in (find, without_tails) if number % 2 else (without_tails, find):
            with patch.object(Prefixes, "find", way):
                began = time.process_time()
                done.append([each.token_ids for each in engine.generate(prompts, params)])
                seconds[way] = time.process_time() - began
            engine.scheduler.drop_kv()
        assert done[0] == done[1]
        ratios.append(seconds[find] / seconds[without_tails])
    tell("tails copied / run by each sibling", ratios)


def tell(what: str, ratios: list[float]) -> None:
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"CPU seconds, {what}: median {statistics.median(ratios):.3f} of {len(ratios)} pairs ({spread})")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--tails", type=int, metavar="PROMPT_TOKENS")
    parser.add_argument("--group", type=int, default=8)
    given = parser.parse_args()
    if given.tails:
        tails(given.tails, given.group, given.rows, given.tokens, given.pairs)
    else:
        memory(given)


def memory(given: argparse.Namespace) -> None:
    with the_old_way():
        before = make()
    engines = {"at once": before, "on demand": make()}

    def resident() -> str:
        return ", ".join(
            f"{name} {resident_bytes(engine.state.target.runner.kv) / MEGABYTE:.1f} MB"
            for name, engine in engines.items()
        )

    print(f"at the start: {resident()}")
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(given.pairs + 1):
        for name in sorted(engines, reverse=bool(number % 2)):
            with the_old_way() if name == "at once" else patch.dict({}, {}):
                seconds[name].append(step(engines[name], number, given.rows, given.tokens))
    ratios = [new / old for new, old in zip(seconds["on demand"][1:], seconds["at once"][1:], strict=True)]
    print(f"after steps of {given.rows} answers of {given.tokens} tokens: {resident()}")
    engine = engines["on demand"]
    for rows in (4 * given.rows, given.rows, given.rows):
        step(engine, 99, rows, given.tokens)
        print(f"after one of {rows}: on demand {resident_bytes(engine.state.target.runner.kv) / MEGABYTE:.1f} MB")
    tell("on demand / at once", ratios)


if __name__ == "__main__":
    main()

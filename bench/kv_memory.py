"""What KV memory that is mapped on demand takes, and what it costs: against memory written when it is made.

    python bench/kv_memory.py [--pairs 9] [--rows 32] [--tokens 96]

Two engines of the synthetic 3.3M model (fp32, no drafts, room for 64 rows of 1,024 tokens) do the same training steps
in turn: groups of 8 answers, then new weights. Printed: resident KV memory after the start, after a step, after a step
four times as large and after the two steps behind it; and CPU seconds, as the median ratio of pairs. Linux only.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from rlhfspec.engine import Engine, SamplingParams
from rlhfspec.engine.cache import resident_bytes
from rlhfspec.tiny import ensure
from rlhfspec.tiny.library import prompts

MEGABYTE = 1 << 20


def written_at_once(*, dtype: torch.dtype, device: torch.device, **shape: int) -> torch.Tensor:
    """As KV memory was made before."""
    num_blocks, layers, size, heads, dim = (
        shape[name] for name in ("num_blocks", "num_layers", "block_size", "num_kv_heads", "head_dim")
    )
    return torch.zeros((num_blocks, layers, 2, size, heads, dim), dtype=dtype, device=device)


@contextmanager
def the_old_way() -> Iterator[None]:
    with patch("rlhfspec.engine.runner.new_kv", written_at_once), patch("rlhfspec.engine.cache._advise_unused"):
        yield


def make() -> Engine:
    return Engine.from_pretrained(ensure("target").target, speculation="off", num_threads=1)


def step(engine: Engine, number: int, rows: int, tokens: int) -> float:
    """CPU seconds."""
    texts = [prompt for prompt in prompts(rows // 8, seed=number) for _ in range(8)]
    began = time.process_time()
    engine.generate(texts, SamplingParams(max_tokens=tokens, ignore_eos=True))
    engine.scheduler.drop_kv()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    given = parser.parse_args()
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
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"CPU seconds, on demand / at once: median {statistics.median(ratios):.3f} of {len(ratios)} pairs ({spread})")


if __name__ == "__main__":
    main()

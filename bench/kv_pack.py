"""Compare packing KV for a move, checksums included, with memcpy in CPU time of one thread.

    python bench/kv_pack.py [--tokens 1024] [--repeats 41]

The source packs into link memory and computes a checksum; the destination computes it again and unpacks. A third of the
slots do not follow their neighbour, as after drafted trees.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from rlhfspec.engine.kv.cache import new_kv
from rlhfspec.engine.kv.state_bytes import checksum_of
from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.kv_pack import pack_into, pack_slots_reference, unpack_from, unpack_slots_reference

# layers, KV heads, head dim, type
MODELS = {
    "77M, bf16": (4, 4, 64, torch.bfloat16),
    "77M, fp32": (4, 4, 64, torch.float32),
    "65 KB a token, bf16": (8, 16, 128, torch.bfloat16),
}


def scattered(num_tokens: int, num_blocks: int, block_size: int) -> np.ndarray:
    """Return slots in shuffled blocks, with a third of the neighbours swapped."""
    rng = np.random.default_rng(1)
    blocks = rng.permutation(num_blocks)[: -(-num_tokens // block_size)].astype(np.int32)
    slots = (blocks[:, None] * block_size + np.arange(block_size, dtype=np.int32)).ravel()[:num_tokens]
    for at in np.flatnonzero(rng.random(num_tokens - 1) < 1 / 3):
        slots[at], slots[at + 1] = slots[at + 1], slots[at]
    return slots


def measure(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median thread CPU milliseconds of each way; the ways take turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.thread_time()
            way()
            times[name].append((time.thread_time() - began) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def ways_of(model: str, num_tokens: int) -> tuple[int, dict[str, Callable[[], object]]]:
    num_layers, num_heads, dim, dtype = MODELS[model]
    num_blocks = num_tokens // 16 * 2 + 1
    kv = new_kv(
        num_blocks=num_blocks, num_layers=num_layers, block_size=16, num_kv_heads=num_heads, head_dim=dim,
        dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    kv += 1  # touches every page
    there, slots = kv.clone(), scattered(num_tokens, num_blocks, 16)
    size = kv.nbytes // (num_blocks * 16)
    link, other = (np.ones((num_tokens, size), np.uint8) for _ in range(2))
    as_torch, packed = torch.from_numpy(slots), pack_slots_reference(kv, torch.from_numpy(slots))
    return link.nbytes, {
        "memcpy": lambda: np.copyto(other, link),
        "pack": lambda: pack_into(kv, slots, link),
        "checksum": lambda: checksum_of([link]),
        "unpack": lambda: unpack_from(link, there, slots),
        "pack, torch": lambda: pack_slots_reference(kv, as_torch),
        "unpack, torch": lambda: unpack_slots_reference(packed, there, as_torch),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=41)
    options = parser.parse_args()
    build.set_num_threads(1)
    torch.set_num_threads(1)
    for model in MODELS:
        num_bytes, ways = ways_of(model, options.tokens)
        times = measure(ways, options.repeats)
        both = times["pack"] + times["unpack"] + 2 * times["checksum"]
        each = ", ".join(f"{name} {ms:.2f}" for name, ms in times.items())
        print(
            f"{model}: {num_bytes / 1e6:.1f} MB; ms: {each}; both ends {both:.2f} = {both / times['memcpy']:.1f} memcpy"
        )


if __name__ == "__main__":
    main()

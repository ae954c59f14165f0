"""Measure the time of attention computed in splits relative to one softmax over all positions.

Pairs take turns; each figure is the median of their ratios. On the CPU, one thread and its CPU time are measured, so
other load hardly matters.

python bench/attention_splits.py [--device cuda] [--split 4096] [--positions 4096,65536] [--rows 1,16] [--repeats 15]
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from rlhfspec.kernels.attention_splits import SPLIT
from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.tree_attention import AttentionMeta, tree_attention

BLOCK_SIZE = 16
SECONDS_OF_A_TURN = 0.01  # short contexts run repeatedly for that long
UNSPLIT = 1 << 30


class Chunk:
    """Last rows of one sequence whose blocks are scattered over a one-layer KV cache."""

    def __init__(self, positions: int, num_rows: int, args: argparse.Namespace, dtype: torch.dtype) -> None:
        num_blocks = -(-positions // BLOCK_SIZE)
        draw = torch.Generator().manual_seed(0)
        blocks = torch.randperm(num_blocks, generator=draw).numpy()
        slots = (blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1).astype(np.int32)[:positions]
        last = np.arange(positions - num_rows, positions, dtype=np.int32)
        self.kv = torch.randn((num_blocks, 1, 2, BLOCK_SIZE, args.kv_heads, args.dim), generator=draw)
        self.kv = self.kv.to(args.device, dtype)
        self.meta = AttentionMeta(
            slots=slots[last], table_rows=np.zeros(num_rows, np.int32), context_lens=last + np.int32(1),
            extra=np.empty((num_rows, 0), np.int32), slot_table=slots[None],
        )  # fmt: skip
        heads = (args.heads, args.kv_heads, args.kv_heads)
        self.rows = [torch.randn((num_rows, count, args.dim), generator=draw).to(args.device) for count in heads]

    def seconds(self, split: int, times: int) -> float:
        start = self._clock()
        for _ in range(times):
            tree_attention(*self.rows, self.kv, 0, self.meta, scale=0.1, split=split)
        return (self._clock() - start) / times

    def _clock(self) -> float:
        if not self.kv.is_cuda:
            return time.thread_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def ratio(chunk: Chunk, split: int, repeats: int) -> tuple[float, float]:
    """Return the milliseconds of one softmax, and the median ratio of split to unsplit time."""
    chunk.seconds(split, 1)  # compiles on a GPU
    chunk.seconds(UNSPLIT, 1)
    times = max(1, int(SECONDS_OF_A_TURN / max(chunk.seconds(UNSPLIT, 1), 1e-9)))
    pairs = [(chunk.seconds(UNSPLIT, times), chunk.seconds(split, times)) for _ in range(repeats)]
    return statistics.median(one for one, _ in pairs) * 1e3, statistics.median(two / one for one, two in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--split", type=int, default=SPLIT)
    parser.add_argument("--positions", default="1024,4096,8192,16384,65536")
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    build.set_num_threads(1)
    where = f"{build.cpu_name()}, isa {build.best_isa()}" if args.device == "cpu" else torch.cuda.get_device_name()
    print(f"{where}; {args.heads} heads of {args.dim} over {args.kv_heads}")
    print(f"{'kv':>8} {'rows':>5} {'positions':>9} {'one softmax, ms':>16} {f'splits of {args.split}':>15}")
    for dtype in (torch.bfloat16, torch.float32):
        for num_rows in map(int, args.rows.split(",")):
            for positions in map(int, args.positions.split(",")):
                unsplit, parts = ratio(Chunk(positions, num_rows, args, dtype), args.split, args.repeats)
                name = str(dtype).removeprefix("torch.")
                print(f"{name:>8} {num_rows:>5} {positions:>9} {unsplit:>16.3f} {parts:>15.3f}", flush=True)


if __name__ == "__main__":
    main()

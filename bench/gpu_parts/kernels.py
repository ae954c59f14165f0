"""Speed of each kernel, next to what the device can reach."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gpu_parts.measure import Day
from rlhfspec.engine.forward.chunks import ChunkedMeta, Chunks, chunk_attention
from rlhfspec.kernels import gumbel
from rlhfspec.kernels.attention_splits import SPLIT
from rlhfspec.kernels.flash import why_not
from rlhfspec.kernels.kv_pack import pack_slots
from rlhfspec.kernels.tree_attention import AttentionMeta, tree_attention

BLOCK_SIZE = 16


class AttentionCall:
    """Attention of one layer: `rows` sequences of `context` tokens in scattered blocks, with `nodes` new rows each.

    One node is plain decoding; more are a tree in which every node has two children.
    """

    def __init__(
        self, day: Day, *, rows: int, context: int, nodes: int, heads: int = 32, kv_heads: int = 8, dim: int = 128
    ) -> None:
        self._day = day
        blocks = -(-(context + nodes) // BLOCK_SIZE)
        order = np.random.default_rng(1).permutation(rows * blocks).astype(np.int32).reshape(rows, blocks)
        table = (order[:, :, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE, dtype=np.int32)).reshape(rows, -1)
        new = table[:, context : context + nodes]  # [rows, nodes]
        extra = np.full((rows, nodes, nodes.bit_length()), -1, np.int32)
        for node in range(nodes):
            path = ancestors(node)
            extra[:, node, : len(path)] = new[:, path]
        self.meta = AttentionMeta(
            slots=new.reshape(-1), table_rows=np.repeat(np.arange(rows, dtype=np.int32), nodes),
            context_lens=np.full(rows * nodes, context, np.int32), extra=extra.reshape(rows * nodes, -1),
            slot_table=np.ascontiguousarray(table),
        )  # fmt: skip
        make = {"device": day.device, "dtype": day.dtype}
        self.kv = torch.randn(rows * blocks, 1, 2, BLOCK_SIZE, kv_heads, dim, **make)
        self.query = torch.randn(rows * nodes, heads, dim, **make)
        self.key, self.value = (torch.randn(rows * nodes, kv_heads, dim, **make) for _ in range(2))

    def run(self, kernel: Callable[..., torch.Tensor] = tree_attention, **options: Any) -> torch.Tensor:
        scale = self.query.shape[2] ** -0.5
        return kernel(self.query, self.key, self.value, self.kv, 0, self.meta, scale=scale, **options)

    def row(self, number: int) -> AttentionCall:
        """Return a call of one row alone; the whole call must run first, to cache the keys of its ancestors."""
        one, only = copy.copy(self), slice(number, number + 1)
        one.query, one.key, one.value = self.query[only], self.key[only], self.value[only]
        meta = self.meta
        one.meta = AttentionMeta(
            slots=meta.slots[only], table_rows=meta.table_rows[only], context_lens=meta.context_lens[only],
            extra=meta.extra[only], slot_table=meta.slot_table,
        )  # fmt: skip
        return one


def ancestors(node: int) -> list[int]:
    """Return the path from the root to the node, both included.

    >>> ancestors(9)
    [0, 1, 4, 9]
    """
    return [*(ancestors((node - 1) // 2) if node else []), node]


def kernels(day: Day) -> None:
    decoding(day)
    prefill(day)
    others(day)


def decoding(day: Day) -> None:
    shapes = [(rows, context) for rows in (1, 32, 256) for context in (1024, 8192, 32_768)]
    for rows, context in shapes if day.is_real else [(2, 64)]:
        call = AttentionCall(day, rows=rows, context=context, nodes=1)
        plain = day.seconds(call.run)
        rate = call.kv.nbytes / plain / 1e12
        bar = ">= 3.4" if rows * context >= 1 << 18 else ""
        day.tell("kernels", f"decode {rows} x {context}", rate, "TB/s", bar)
        for nodes in (8, 16, 32) if rows == 32 and context < 32_768 else ():
            tree = AttentionCall(day, rows=rows, context=context, nodes=nodes)
            bar = "<= 1.3" if nodes == 16 else ""
            day.tell("kernels", f"tree of {nodes}, {rows} x {context}", day.seconds(tree.run) / plain, "x plain", bar)
        del call


def prefill(day: Day) -> None:
    for rows, before in ((512, 4096), (4096, 0)) if day.is_real else ((8, 8),):
        call = AttentionCall(day, rows=1, context=before + rows, nodes=1)
        table = call.meta.slot_table
        meta = AttentionMeta(
            slots=table[0, before : before + rows].copy(), table_rows=np.zeros(rows, np.int32),
            context_lens=np.arange(before + 1, before + rows + 1, dtype=np.int32),
            extra=np.empty((rows, 0), np.int32), slot_table=table,
        )  # fmt: skip
        call.meta = meta
        call.query = torch.randn(rows, 32, 128, device=day.device, dtype=day.dtype)
        call.key, call.value = (torch.randn(rows, 8, 128, device=day.device, dtype=day.dtype) for _ in range(2))
        products = 4 * 32 * 128 * sum(range(before + 1, before + rows + 1))
        name, ours = f"prefill of {rows} behind {before}", day.seconds(call.run)
        day.tell("kernels", f"{name}, own kernel", products / ours / 1e12, "TFLOP/s")
        if reason := why_not(day.device, day.dtype, 128, 128):
            day.tell("kernels", f"{name}, varlen_attn", reason)
            continue
        chunks = Chunks.of(meta, least_rows=rows, most_keys=before + rows)
        assert chunks is not None
        there = ChunkedMeta.of(meta, chunks, day.device)
        options = {"scale": 128**-0.5, "sliding_window": None, "split": SPLIT}
        theirs = day.seconds(
            lambda: chunk_attention(call.query, call.key, call.value, call.kv, 0, there, **options)  # noqa: B023
        )
        rate, bar = products / theirs / 1e12, ">= 400" if before == 0 else ""
        day.tell("kernels", f"{name}, varlen_attn", rate, "TFLOP/s", bar)
        day.tell("kernels", f"{name}, varlen_attn", ours / theirs, "x own kernel", ">= 1")


def others(day: Day) -> None:
    rows, vocab = (32, 128_256) if day.is_real else (4, 97)
    logits = torch.randn(rows, vocab, device=day.device)
    index = torch.arange(rows, device=day.device)
    ones = torch.ones(rows, device=day.device)
    free, masked = torch.zeros_like(index).int(), torch.full_like(ones, 0.9)
    for name, top_p, bar in (("sample", ones, "<= 0.1"), ("sample with top-p", masked, "<= 0.3")):
        took = day.seconds(lambda top_p=top_p: gumbel.sample(logits, index, index.int(), ones, free, top_p))
        day.tell("kernels", name, took * 1e3, "ms", bar)
    blocks = 1024 if day.is_real else 4
    kv = torch.zeros(blocks, 32 if day.is_real else 2, 2, BLOCK_SIZE, 8, 128, device=day.device, dtype=day.dtype)
    slots = torch.randperm(blocks * BLOCK_SIZE, device="cpu")[: blocks * 8].int().to(day.device)
    moved = 2 * kv.nbytes // 2
    day.tell("kernels", "pack", moved / day.seconds(lambda: pack_slots(kv, slots)) / 1e12, "TB/s", ">= 3")

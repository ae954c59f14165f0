"""Layers in few bits, with which a policy drafts for itself, next to torch's bfloat16 products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from gpu_parts.measure import Day, engine_of, llama
from gpu_parts.speed import LAYERS, decoded
from rlhfspec.engine.drafting.cost import TARGET, draft_kind
from rlhfspec.engine.forward.graphs import CudaCapture
from rlhfspec.kernels.few_bit_linear import FewBitLinear, product_reference, quantise_reference

# Outputs and inputs of an 8B model's layer (queries, keys, values, output, gate, up, down) and of its head.
LAYER = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
HEAD = ((128_256, 4096),)
# Reading weights takes most of the time. By bytes a layer is 16 / 4.5 = 3.56 times as fast, and the head 16 / 8.5 =
# 1.88 times. By instructions (263 a block of 128 outputs, on an H200) a layer reads at most 4 TB/s: then 3 times. Each
# program reads its rows again, which shows from 32 rows on.
LAYER_BARS = {1: 2.0, 4: 2.0, 8: 2.0, 16: 2.0, 32: 1.8, 64: 1.5}
HEAD_BARS = {1: 1.5, 4: 1.5, 8: 1.5, 16: 1.5, 32: 1.4, 64: 1.2}


def few_bits(day: Day) -> None:
    if day.is_real:
        products(day, "layer", LAYER, 4, LAYER_BARS)
        products(day, "head", HEAD, 8, HEAD_BARS)
    else:
        products(day, "layer", ((48, 128), (70, 64)), 4, {2: 0})
    drafting(day)


def products(day: Day, name: str, shapes: tuple[tuple[int, int], ...], bits: int, bars: dict[int, float]) -> None:
    weights = [torch.randn(shape, device=day.device, dtype=day.dtype) for shape in shapes]
    layers = [FewBitLinear(weight, None, bits) for weight in weights]
    numbers, scales = quantise_reference(weights[0], bits)
    differing = int((layers[0].numbers != numbers).sum()) + int((layers[0].scales != scales).sum())
    day.tell("few_bits", f"{name}: numbers other than the reference's", differing, "", "= 0")
    stored = sum(layer.numbers.nbytes + layer.scales.nbytes for layer in layers)
    for rows, bar in bars.items():
        x = {size: torch.randn(rows, size, device=day.device, dtype=day.dtype) for _, size in shapes}
        given = x[shapes[0][1]]
        found, expected = layers[0](given).float(), product_reference(given, numbers, scales, None).float()
        off = float((found - expected).abs().max() / expected.abs().max())
        day.tell("few_bits", f"{name}, {rows} rows: off by", off, "of largest", "<= 0.01")
        plain = day.seconds(graphed(day, lambda x=x: [functional.linear(x[each.shape[1]], each) for each in weights]))
        few = day.seconds(graphed(day, lambda x=x: [layer(x[layer.in_features]) for layer in layers]))
        day.tell("few_bits", f"{name} in {bits} bits, {rows} rows", plain / few, "x bfloat16", f">= {bar}")
        day.tell("few_bits", f"{name} in {bits} bits, {rows} rows", stored / few / 1e12, "TB/s")


def graphed(day: Day, work: Callable[[], Any]) -> Callable[[], object]:
    """Return `work` as a CUDA graph, as engines run it: launches would take longer than the products."""
    return CudaCapture()(work) if day.is_real else work


def drafting(day: Day) -> None:
    """Measure the policy as its own drafter: how long its copy takes to make, and a level beside a verification.

    Random weights agree less than a trained model's: see docs/gpus.md for the speed-up of a real one.
    """
    model = llama(day, layers=LAYERS, size="8B")
    prompt, answer = (512, 128) if day.is_real else (24, 8)
    for rows in (1, 4, 8, 32) if day.is_real else (2,):
        room = {"max_sequences": rows, "max_context": prompt + answer + 32}
        made = engine_of(day, model, speculation="off", **room)
        plain, _ = decoded(day, made, rows, prompt, answer)
        made = engine_of(day, model, draft="self", speculation="model-d3", profile=True, **room)
        costs, few = made.speculation.costs, made.state.few_bits
        assert few is not None
        level = costs.table(draft_kind("model")).seconds(rows) / costs.table(TARGET).seconds(rows)
        day.tell("few_bits", f"level of a draft, {rows} rows", level, "of a step", "<= 0.45")
        drafted, per_step = decoded(day, made, rows, prompt, answer)
        day.tell("few_bits", f"tokens a verification, {rows} rows", per_step)
        if rows == 1:
            day.tell("few_bits", f"quantising {LAYERS} layers and head", day.seconds(few.requantise), "s", "<= 0.02")
        day.tell("few_bits", f"drafts of three by itself, {rows} rows", drafted / plain, "x plain")
        del made, few
        day.forget_peak()

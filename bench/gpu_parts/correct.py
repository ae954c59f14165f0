"""Correctness checks of a GPU day: kernels against references, the law, copies and waits of a step."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpu_parts.kernels import AttentionCall
from gpu_parts.measure import Day, engine_of, llama, requests, run
from rlhfspec.engine import Engine
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.kernels import gumbel
from rlhfspec.kernels.kv_pack import pack_slots, pack_slots_reference
from rlhfspec.kernels.tree_attention import tree_attention, tree_attention_reference

CHAIN = DraftPlan(drafter="model", depth=3)
TREE = DraftPlan(drafter="suffix", depth=4, width=2, branch=2)


def environment(day: Day) -> None:
    """Report versions, and the copy and matrix rates to compare others with."""
    day.tell("environment", "torch", torch.__version__)
    day.tell("environment", "python", platform.python_version())
    if day.device.type == "cuda":
        about = torch.cuda.get_device_properties(day.device)
        day.tell("environment", "device", about.name)
        day.tell("environment", "compute capability", f"{about.major}.{about.minor}")
        day.tell("environment", "memory", about.total_memory / 2**30, "GiB")
    day.tell("environment", "copy", copy_rate(day) / 1e12, "TB/s")
    size = 8192 if day.is_real else 64
    square = torch.randn(size, size, device=day.device, dtype=day.dtype)
    day.tell("environment", "matrix product", 2 * size**3 / day.seconds(lambda: square @ square) / 1e12, "TFLOP/s")


def copy_rate(day: Day) -> float:
    """Return the bytes per second that the device reads and writes."""
    source = torch.zeros((1 << 31) if day.is_real else 1 << 16, dtype=torch.uint8, device=day.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / day.seconds(lambda: target.copy_(source))


def twins(day: Day) -> None:
    """Compare kernels with their reference implementations on the device."""
    sizes = ((32, 8, 128), (28, 4, 128), (8, 1, 256)) if day.is_real else ((4, 2, 16),)
    options: tuple[dict[str, Any], ...] = ({}, {"sliding_window": 100}, {"softcap": 30.0})
    for heads, kv_heads, dim in sizes:
        for nodes in (1, 16):
            call = AttentionCall(day, rows=4, context=300, nodes=nodes, heads=heads, kv_heads=kv_heads, dim=dim)
            for chosen in options:
                found, expected = (
                    call.run(kernel, **chosen).float() for kernel in (tree_attention, tree_attention_reference)
                )
                off = float((found - expected).abs().max() / expected.abs().max())
                name = f"attention {heads}/{kv_heads} of {dim}, {nodes} nodes {' '.join(chosen)}"
                day.tell("twins", name, off, "of largest", "<= 0.02")
    call = AttentionCall(day, rows=2, context=300, nodes=16)
    together = call.run()
    alone = torch.cat([call.row(row).run() for row in range(len(together))])
    day.tell("twins", "rows with other bits alone", int((together != alone).flatten(1).any(1).sum()), "of 32", "= 0")
    day.tell("twins", "samples that differ", differing_samples(day), "of 512", "= 0")
    call = AttentionCall(day, rows=4, context=300, nodes=1)
    slots = torch.arange(100, 1100, dtype=torch.int32, device=day.device) % (call.kv.shape[0] * 16)
    same = torch.equal(pack_slots(call.kv, slots), pack_slots_reference(call.kv, slots))
    day.tell("twins", "packed KV is the same", int(same), "", "= 1")


def differing_samples(day: Day) -> int:
    rows, vocab = 512, 32_000 if day.is_real else 97
    logits = 3 * torch.randn(rows, vocab, device=day.device)
    index = torch.arange(rows, device=day.device)
    arguments = (
        logits, index, index.int(), torch.full((rows,), 0.9, device=day.device),
        (index % 3 * 20).int(), torch.where(index % 2 == 0, 0.9, 1.0).float(),
    )  # fmt: skip
    return int((gumbel.sample(*arguments).tokens != gumbel.sample_reference(*arguments).tokens).sum())


def law(day: Day) -> None:
    """Check that tokens are equal with and without speculation, in any batch, preempted, and after a move."""
    model, answer = llama(day, layers=8, size="1.5B"), 300 if day.is_real else 12
    vocab = model.config.vocab_size
    asked = requests(64 if day.is_real else 4, prompt=48, answer=answer, vocab=vocab)
    room = {"max_context": 400, "max_sequences": len(asked)}
    plain = run(engine_of(day, model, speculation="off", **room), asked)
    tokens = len(asked) * answer
    day.tell("law", "tokens compared, each way", tokens)
    ways = {
        "trees of suffixes": engine_of(day, model, speculation=TREE, **room),
        "the policy in few bits": engine_of(day, model, draft="self", speculation=CHAIN, **room),
        "four at a time": engine_of(day, model, speculation="off", **room | {"max_sequences": 4}),
        "preempted": engine_of(day, model, speculation="off", **room, kv_cache_tokens=len(asked) * 160),
    }
    for name, engine in ways.items():
        day.tell("law", f"{name}: flips", flips(plain, run(engine, asked)), "", f"<= {max(1, tokens // 100_000)}")
    day.tell("law", "moved half-way: flips", flips(plain, moved(day, model, asked, room)), "", "<= 1")
    exactly = run(engine_of(day, model, speculation="off", exact="on", **room), asked)
    drafted = run(engine_of(day, model, speculation=TREE, exact="on", **room | {"prefill_chunk": 40}), asked)
    day.tell("law", "exactly, trees of suffixes: flips", flips(exactly, drafted), "", "= 0")
    others = sum(exactly[name].log_probs != sample.log_probs for name, sample in drafted.items())
    day.tell("law", "exactly: samples with other bits", others, "", "= 0")


def flips(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Return the number of sequences whose tokens differ; tokens after a first flip are not counted."""
    return sum(one[name].token_ids != other[name].token_ids for name in one)


def moved(day: Day, model: Any, asked: list[Any], room: dict[str, Any]) -> dict[str, Any]:
    """Start every sequence on one engine, finish it on another, and return the completions."""
    here, there = (engine_of(day, model, speculation="off", **room) for _ in range(2))
    for request in asked:
        here.submit(request)
    done = {}
    for _ in range(8):
        done.update({completion.id: completion for completion in here.step().finished})
    for request in asked:
        if request.id not in done:
            there.import_sequence(here.export_sequence(request.id))
            assert here.cancel(request.id)
    return done | run(there, [])


def waits(day: Day) -> None:
    """Count a step's copies and waits; the layers must not wait, so that CUDA graphs can capture them."""
    model = llama(day, layers=8, size="1.5B")
    engine = engine_of(day, model, keep=False, speculation="off", max_context=600, max_sequences=64)
    for request in requests(64 if day.is_real else 4, prompt=100, answer=200, vocab=model.config.vocab_size):
        engine.submit(request)
    with unwaiting_layers(day, engine):
        for _ in range(12):
            engine.step()
    day.tell("waits", "layers waited", 0)
    if day.device.type != "cuda":
        return
    from torch.profiler import ProfilerActivity, profile

    steps = 20
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(steps):
            engine.step()
        day.wait()
    events = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    for way, bar in (("HtoD", 1), ("DtoH", 1)):
        copies = sum(f"Memcpy {way}" in event.name for event in events) / steps
        day.tell("waits", f"copies {way} a step", copies, "", f"<= {bar}")
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    whole = spans[-1][1] - spans[0][0]
    day.tell("waits", "the GPU is idle", 1 - busy(spans) / whole, "of a step", "<= 0.1")


def busy(spans: list[tuple[float, float]]) -> float:
    """Return the time covered by at least one of the spans."""
    covered, end = 0.0, float("-inf")
    for first, last in spans:
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    return covered


@contextmanager
def unwaiting_layers(day: Day, engine: Engine) -> Iterator[None]:
    """Raise an error inside the context if the layers wait for the device."""
    runner = engine.state.target.runner
    run_layers = runner._run_layers

    def watched(*arguments: Any) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run_layers(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    if day.device.type == "cuda":
        runner._run_layers = watched  # type: ignore[method-assign]
        if runner._graphs is not None:
            runner._graphs.forward = watched
    yield

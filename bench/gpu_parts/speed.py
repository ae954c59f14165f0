"""Tokens per second of the engine and of scorers."""

from __future__ import annotations

import time
from typing import Any

import torch

from gpu_parts.measure import Day, engine_of, llama, requests
from rlhfspec.engine import Engine
from rlhfspec.training.modeling.loading import prepared
from rlhfspec.training.scoring.log_probs import LogProbScorer

LAYERS = 8  # of a model of 8B's widths, which has 32: a day is short


def engine(day: Day) -> None:
    """Measure an 8B model with a quarter of its layers, so steps are four times as fast except vocabulary and host."""
    model = llama(day, layers=LAYERS, size="8B")
    prompt, answer = (1024, 256) if day.is_real else (24, 6)
    # a quarter of the layers; a whole model's steps, from GPU.md's expectation of it, are four times as long at most
    bars = {1: 190, 64: 7_000, 256: 16_000}
    for rows, bar in bars.items() if day.is_real else ((2, 0),):
        made = engine_of(day, model, speculation="off", max_sequences=rows, max_context=prompt + answer + 8)
        rate, _ = decoded(day, made, rows, prompt, answer)
        day.tell("engine", f"plain, {rows} rows, {LAYERS} layers", rate, "tokens/s", f">= {bar}")
        del made
        day.forget_peak()
        made = engine_of(day, model, speculation="off", exact="on", max_sequences=rows, max_context=prompt + answer + 8)
        exactly, _ = decoded(day, made, rows, prompt, answer)
        day.tell("engine", f"exact, {rows} rows, {LAYERS} layers", exactly / rate, "x plain", ">= 0.5")
        del made
        day.forget_peak()
    prompts(day, model)
    for rows in (1, 8, 32) if day.is_real else (1,):
        rates = {}
        for way in ("off", "suffix"):
            made = engine_of(
                day, model, speculation=way, profile=True, max_sequences=rows, max_context=prompt + answer + 8
            )
            rates[way], per_step = decoded(day, made, rows, prompt, answer, echo=True)
            del made
        name = f"suffix drafts on echoing prompts, {rows} rows"
        day.tell("engine", name, rates["suffix"] / rates["off"], "x plain", ">= 0.98")
        day.tell("engine", f"tokens a verification, {rows} rows", per_step)


def prompts(day: Day, model: Any) -> None:
    """Measure prefill tokens per second, with chunks run by FlashAttention and by rlhfspec's kernel."""
    prompt, rows = (4096, 8) if day.is_real else (80, 2)
    made = engine_of(day, model, speculation="off", max_sequences=rows, max_context=prompt + 16)
    runner = made.state.target.runner
    day.tell("engine", "chunks of prompts run by", made.reports["model"].prefill)
    rates = {}
    for name, by_flash in (("as loaded", runner._by_flash), ("own kernel", frozenset[int]())):
        runner._by_flash = by_flash
        for warm in (True, False):
            made.forget_kept()
            day.wait()
            began = time.perf_counter()
            for request in requests(rows, prompt=prompt, answer=1, vocab=runner.vocab_size):
                made.submit(request)
            while made.has_work:
                made.step()
            day.wait()
            if not warm:
                rates[name] = rows * prompt / (time.perf_counter() - began)
    day.tell("engine", f"prompts of {prompt}, {LAYERS} layers", rates["as loaded"], "tokens/s")
    day.tell("engine", f"prompts of {prompt}", rates["as loaded"] / rates["own kernel"], "x own kernel", ">= 1")


def decoded(
    day: Day, engine: Engine, rows: int, prompt: int, answer: int, *, echo: bool = False
) -> tuple[float, float]:
    """Return tokens per second after prefill, and tokens per row and step."""
    vocab = engine.state.target.runner.vocab_size
    for request in requests(rows, prompt=prompt, answer=answer, vocab=vocab, echo=echo):
        engine.submit(request)
    while engine.step().num_prefill_tokens:
        pass
    day.wait()
    began, tokens, steps = time.perf_counter(), 0, 0
    while engine.has_work and steps < answer - 4:
        tokens += engine.step().num_committed
        steps += 1
    day.wait()
    return tokens / (time.perf_counter() - began), tokens / max(steps, 1) / rows


def scorers(day: Day) -> None:
    length = 1024 if day.is_real else 24
    model = prepared(llama(day, layers=LAYERS, size="8B"), max_context=2 * length)
    dtype = str(day.dtype).removeprefix("torch.")
    scorer = LogProbScorer(model, temperature=1.0, max_context=2 * length, dtype=dtype, device=str(day.device))
    drawn = torch.Generator().manual_seed(3)
    vocab = model.config.vocab_size
    samples = [
        (torch.randint(3, vocab, (length // 4,), generator=drawn).tolist(),
         torch.randint(3, vocab, (length,), generator=drawn).tolist()) for _ in range(24 if day.is_real else 3)
    ]  # fmt: skip
    scorer.log_probs(*samples[0])
    began = time.perf_counter()
    scorer.log_probs_of(samples)
    took = time.perf_counter() - began
    day.tell(
        "scorers", f"reference, {LAYERS} layers of 8B", len(samples) * length * 1.25 / took, "tokens/s", ">= 60000"
    )

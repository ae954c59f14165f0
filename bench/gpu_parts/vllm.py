"""Engine `vllm` as a job creates it: its check at load, its tokens, and its speed next to two other engines."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpu_parts.measure import Day, llama, requests, run
from rlhfspec.bench.worker import Worker, vllm_command
from rlhfspec.engine.base import EngineProtocol, Request
from rlhfspec.engine.vllm.finding import INSTALL_VLLM, find_python
from rlhfspec.job import RLHFJob
from rlhfspec.job.choices.engines import ENGINES
from rlhfspec.tiny import random_model

LAYERS = 8
BAR = ">= 0.97"  # of vLLM's own sampler
Generate = Callable[[list[Request]], int]  # returns the number of tokens


def vllm(day: Day) -> None:
    """Compare the engine's logits and tokens, then measure its tokens per second without drafts."""
    python = find_python(None)
    if python is None or day.device.type not in ("cpu", "cuda"):
        day.tell("vllm", "left out", INSTALL_VLLM if python is None else f"vLLM has no device {day.device.type}")
        return
    prompt, answer, counts = (512, 256, (1, 8, 32)) if day.is_real else (24, 8, (2,))
    with tempfile.TemporaryDirectory(prefix="gpu-day-vllm-") as folder:
        tiny = None if day.is_real else random_model("llama", seed=0, head_dim=32)  # vLLM has no smaller heads on a CPU
        model = tiny or llama(day, layers=LAYERS, size="1.5B")
        model.to(day.dtype).save_pretrained(folder)
        asked = {rows: requests(rows, prompt=prompt, answer=answer, vocab=model.config.vocab_size) for rows in counts}
        del model
        job = _job(folder, day, prompt, answer, max(counts))
        speeds, tokens = {}, {}
        for name in ("own", "vllm"):
            with _engine(job, name) as engine:
                speeds[name] = {rows: _speed(_generates(engine), each) for rows, each in asked.items()}
                tokens[name] = run(engine, asked[max(counts)])
                report = engine.reports["model"]
        day.tell("vllm", "arithmetic", report.bits)
        day.tell("vllm", "logits beside Hugging Face's", report.difference, "of largest", "<= 0.1")
        others = sum(tokens["own"][each].token_ids != tokens["vllm"][each].token_ids for each in tokens["own"])
        day.tell("vllm", "samples other than our engine's", others, f"of {len(tokens['own'])}")
        speeds["LLM.generate"] = _of_rival(python, folder, day, prompt + answer, asked)
        for rows in counts:
            for name, of_one in speeds.items():
                day.tell("vllm", f"{name}, {rows} sequences", of_one[rows], "tokens/s")
            ratio = speeds["vllm"][rows] / speeds["LLM.generate"][rows]
            day.tell("vllm", f"the law, {rows} sequences", ratio, "x LLM.generate", BAR)
        _over_two(day, job, asked[max(counts)], tokens["vllm"])


def _over_two(day: Day, job: RLHFJob, asked: list[Request], whole: dict[str, Any]) -> None:
    if torch.cuda.device_count() < 2:
        day.tell("vllm", "tensorParallel 2", "left out: it needs two GPUs")
        return
    with _engine(job, "vllm", tensor_parallel=2) as engine:
        done = run(engine, asked)
        others = sum(done[name].token_ids != each.token_ids for name, each in whole.items())
        day.tell("vllm", "tensorParallel 2: samples other than with 1", others, f"of {len(asked)}")
        day.tell("vllm", f"tensorParallel 2, {len(asked)} sequences", _speed(_generates(engine), asked), "tokens/s")


def _job(folder: str, day: Day, prompt: int, answer: int, rows: int) -> RLHFJob:
    spec = {
        "model": {"path": folder},
        "dataset": {"path": "none.jsonl", "maxPromptTokens": prompt},
        "algorithm": {"name": "grpo", "samplesPerPrompt": rows},
        "rewards": {"sources": [{"type": "function", "function": "none:none"}]},
        "generation": {"maxTokens": answer, "maxSequences": rows, "speculation": {"mode": "off"}},
        "device": day.device.type,
    }
    content = {"apiVersion": "rlhfspec.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "day"}, "spec": spec}
    return RLHFJob.model_validate(content)


@contextmanager
def _engine(job: RLHFJob, name: str, *, tensor_parallel: int = 1) -> Iterator[EngineProtocol]:
    """Yield an engine, and free the GPU afterwards for the next one."""
    roles = job.spec.roles
    generator = roles.generator.model_copy(update={"tensor_parallel": tensor_parallel})
    generation = job.spec.generation.model_copy(
        update={"engine": job.spec.generation.engine.model_copy(update={"name": name})}
    )
    spec = {"generation": generation, "roles": roles.model_copy(update={"generator": generator})}
    engine = ENGINES[name].load()(job.model_copy(update={"spec": job.spec.model_copy(update=spec)}), lambda: None)
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def _generates(engine: EngineProtocol) -> Generate:
    return lambda asked: sum(len(each.token_ids) for each in run(engine, asked).values())


def _of_rival(
    python: Path, folder: str, day: Day, max_context: int, asked: dict[int, list[Request]]
) -> dict[int, float]:  # fmt: skip
    with Worker.start(vllm_command(python), num_threads=torch.get_num_threads()) as worker:
        worker.ask(
            "load", target=folder, dtype=str(day.dtype).removeprefix("torch."), max_context=max_context,
            max_sequences=max(asked),
        )  # fmt: skip

        def generate(asked: list[Request]) -> int:
            prompts = [list(each.prompt_token_ids) for each in asked]
            lengths = [each.params.max_tokens for each in asked]
            return int(worker.ask("run", prompts=prompts, max_tokens=lengths)["num_tokens"])

        return {rows: _speed(generate, each) for rows, each in asked.items()}


def _speed(generate: Generate, asked: list[Request]) -> float:
    """Return tokens per second, prefill included, after a warm-up run."""
    generate(asked)
    began = time.perf_counter()
    return generate(asked) / (time.perf_counter() - began)

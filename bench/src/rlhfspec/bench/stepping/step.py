"""Benchmark of a training step against TRL: the same model, prompts, lengths, algorithm and threads.

Each repetition runs `rlhfspec run JOB` in a process, timed by its run folder, and TRL's GRPO trainer in another. Modes
take turns. The first step of a process (warm-up, compilation, allocation) does not count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhfspec.bench.bars import bars_of_step
from rlhfspec.bench.generating.results import published
from rlhfspec.bench.processor import processor
from rlhfspec.bench.stepping.results import (
    ADAPTIVE,
    PLAIN_STEP,
    STEP_PARTS,
    TRL,
    Step,
    StepResults,
    StepRow,
    check_equal_work,
)
from rlhfspec.bench.worker import RIVALS, Worker, WorkerFailed, environment
from rlhfspec.errors import InvalidRequest
from rlhfspec.tiny.corpus import prompts, text
from rlhfspec.tiny.tokenizer import decode

_MODES = (TRL, PLAIN_STEP, ADAPTIVE)
_ALGORITHMS = ("grpo", "ppo")
WARM_UP_STEPS = 1
_PATIENCE_SECONDS = 3600.0
_PROMPTS_SEED = 20  # of the corpus; training saw other seeds

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Settings of the benchmark. With bfloat16, both sides use autocast and the engine bfloat16 weights."""

    model: str
    draft: str | None
    modes: tuple[str, ...] = _MODES
    trl_python: str | None = None
    algorithm: str = "grpo"  # or ppo, whose critic is a new head on the model
    num_prompt_tokens: int | None = None  # of every prompt; None: beginnings of documents, 24 to 96
    prompts_per_step: int = 4
    samples_per_prompt: int = 4
    num_tokens: int = 256
    steps: int = 2  # measured in each repetition
    repeats: int = 3
    num_threads: int = 2
    dtype: str = "float32"
    lora_rank: int | None = None  # None: all weights are trained
    kl_coefficient: float = 0.04
    learning_rate: float = 1e-6
    seed: int = 0

    def __post_init__(self) -> None:
        for mode in self.modes:
            if mode not in _MODES:
                raise InvalidRequest("modes", mode, f"must be among {', '.join(_MODES)}")
        if self.algorithm not in _ALGORITHMS:
            raise InvalidRequest("algorithm", self.algorithm, f"must be among {', '.join(_ALGORITHMS)}")
        if self.samples_per_prompt < 2:
            raise InvalidRequest("samples_per_prompt", self.samples_per_prompt, "must be >= 2: GRPO compares samples")
        if self.lora_rank is not None and self.lora_rank < 1:
            raise InvalidRequest("lora_rank", self.lora_rank, "must be >= 1")
        if self.num_prompt_tokens is not None and self.num_prompt_tokens < 2:
            raise InvalidRequest("num_prompt_tokens", self.num_prompt_tokens, "must be >= 2: the first is BOS")
        for name in ("prompts_per_step", "num_tokens", "steps", "repeats", "num_threads"):
            if getattr(self, name) < 1:
                raise InvalidRequest(name, getattr(self, name), "must be >= 1")

    @property
    def num_steps(self) -> int:
        return WARM_UP_STEPS + self.steps

    def prompts(self) -> list[str]:
        """Return enough prompts for all steps, so that none repeats."""
        count = self.num_steps * self.prompts_per_step
        if self.num_prompt_tokens is None:
            return [decode(ids) for ids in prompts(count, seed=_PROMPTS_SEED)]
        size = self.num_prompt_tokens - 1  # BOS comes before it
        whole = text(count * size, seed=_PROMPTS_SEED)
        return [whole[start : start + size] for start in range(0, count * size, size)]


Measure = Callable[[StepSettings], list[Step]]


class StepBenchmark:
    """Benchmark of rlhfspec and TRL. Tests pass `measures`, functions that run a mode once."""

    def __init__(
        self, settings: StepSettings, report: Report = print, measures: dict[str, Measure] | None = None
    ) -> None:
        self._settings = settings
        self._report = report
        self._measures = measures or {TRL: measure_trl, PLAIN_STEP: measure_plain, ADAPTIVE: measure_adaptive}
        self._skipped: dict[str, str] = {}

    def run(self) -> StepResults:
        steps: dict[str, list[Step]] = {mode: [] for mode in self._settings.modes}
        for repetition in range(self._settings.repeats):
            for mode in self._turn(repetition):
                steps[mode] += self._measure(mode, repetition)
        rows = tuple(StepRow.of(mode, measured) for mode, measured in steps.items() if measured)
        check_equal_work(rows)
        return StepResults(
            machine=processor(arithmetic=_arithmetic(self._settings.dtype)),
            settings=published(self._settings, "model", "draft", "trl_python"),
            rows=rows,
            bars=bars_of_step(rows, self._settings.num_threads),
            skipped=tuple(f"{mode}: {reason}" for mode, reason in self._skipped.items()),
        )

    def _turn(self, repetition: int) -> list[str]:
        """Return this repetition's order of the modes not skipped, rotated so that each comes first in turn."""
        modes = [mode for mode in self._settings.modes if mode not in self._skipped]
        start = repetition % len(modes) if modes else 0
        return modes[start:] + modes[:start]

    def _measure(self, mode: str, repetition: int) -> list[Step]:
        self._report(f"repetition {repetition + 1}/{self._settings.repeats}: {mode}")
        try:
            steps = self._measures[mode](self._settings)[WARM_UP_STEPS:]
        except WorkerFailed as failure:
            if mode != TRL:
                raise
            self._skipped[mode] = str(failure).splitlines()[0]
            self._report(f"{mode} is left out: {self._skipped[mode]}")
            return []
        seconds = ", ".join(f"{step.seconds:.2f}" for step in steps)
        self._report(f"repetition {repetition + 1}/{self._settings.repeats}: {mode} took {seconds} s a step")
        return steps


def _arithmetic(dtype: str) -> str:
    import torch

    from rlhfspec.kernels.linear import arithmetic_for

    return arithmetic_for(getattr(torch, dtype))


# -- TRL --------------------------------------------------------------------------------------------------------------


def find_trl_python(given: str | None) -> Path | None:
    """Return the given interpreter, else that of .venv-trl, or None."""
    if given is not None:
        path = Path(given)
        if not path.exists():
            raise InvalidRequest("trl_python", given, "no such file")
        return path
    own = Path(".venv-trl/bin/python")
    return own.absolute() if own.exists() else None


def measure_trl(settings: StepSettings) -> list[Step]:
    if settings.algorithm != "grpo":
        raise WorkerFailed(f"TRL 1.16 trains no {settings.algorithm}")
    python = find_trl_python(settings.trl_python)
    if python is None:
        raise WorkerFailed("no TRL here (make setup-trl, or --trl-python)")
    command = [str(python), str(RIVALS / "trl_worker.py")]
    with (
        tempfile.TemporaryDirectory() as folder,
        Worker.start(command, num_threads=settings.num_threads, patience_seconds=_PATIENCE_SECONDS) as worker,
    ):
        answer = worker.ask("train", **_trl_arguments(settings, folder))
    return [Step(**step, peak_bytes=answer["peak_bytes"]) for step in answer["steps"]]


def _trl_arguments(settings: StepSettings, folder: str) -> dict[str, Any]:
    same = ("model", "prompts_per_step", "samples_per_prompt", "num_tokens", "num_threads", "dtype", "lora_rank",
            "learning_rate", "seed")  # fmt: skip
    return {name: getattr(settings, name) for name in same} | {
        "prompts": settings.prompts(),
        "steps": settings.num_steps,
        "beta": settings.kl_coefficient,
        "folder": folder,
    }


# -- ours -------------------------------------------------------------------------------------------------------------


def measure_plain(settings: StepSettings) -> list[Step]:
    return measure_ours(settings, "off")


def measure_adaptive(settings: StepSettings) -> list[Step]:
    return measure_ours(settings, "adaptive")


def measure_ours(settings: StepSettings, speculation: str) -> list[Step]:
    lines, peak_bytes = run_ours(settings, speculation)
    return [replace(step, peak_bytes=peak_bytes) for step in steps_of(lines)]


def run_ours(settings: StepSettings, speculation: str, *arguments: str) -> tuple[str, int]:
    """Run `rlhfspec run` with extra `arguments`. Return the text of its steps.jsonl and its peak of resident bytes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in settings.prompts()))
        (folder / "job.json").write_text(json.dumps(job_of(settings, speculation)))
        command = [sys.executable, "-m", "rlhfspec.cli.start", "run", "job.json", "--out", "out", *arguments]
        with (folder / "said").open("wb") as said:
            env = os.environ | environment(settings.num_threads)
            process = subprocess.Popen(command, cwd=folder, env=env, stdout=said, stderr=said)
        peak_bytes = _waited(process)
        if process.returncode != 0:
            told = "\n".join((folder / "said").read_text().splitlines()[-30:])
            raise WorkerFailed(f"rlhfspec run ended with exit code {process.returncode}:\n{told}")
        return (folder / "out" / "steps.jsonl").read_text(), peak_bytes


def _waited(process: subprocess.Popen[bytes]) -> int:
    """Wait for the process as Popen does, and return its peak of resident bytes, which Popen does not tell."""
    patience = threading.Timer(_PATIENCE_SECONDS, process.kill)
    patience.start()
    try:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        patience.cancel()
        if process.returncode is None:  # interrupted
            process.kill()
            process.wait()
    return usage.ru_maxrss * 1024


def job_of(settings: StepSettings, speculation: str) -> dict[str, Any]:
    """Return the job that matches TRL's configuration."""
    bfloat16 = settings.dtype == "bfloat16"
    longest = {} if settings.num_prompt_tokens is None else {"maxPromptTokens": settings.num_prompt_tokens}
    spec = {
        "model": {"path": settings.model, "drafter": settings.draft}
        | ({} if settings.lora_rank is None else {"lora": {"rank": settings.lora_rank}}),
        "dataset": {"path": "prompts.jsonl", "shuffle": False} | longest,
        "algorithm": {
            "name": settings.algorithm,
            "samplesPerPrompt": settings.samples_per_prompt,
            "klCoefficient": settings.kl_coefficient,
        },
        "generation": {
            "maxTokens": settings.num_tokens,
            "ignoreEos": True,
            "speculation": {"mode": speculation},
            "dtype": settings.dtype,
        },
        "rewards": {"sources": [{"type": "function", "function": "rlhfspec.bench.rivals.trl_worker:variety"}]},
        "training": {
            "steps": settings.num_steps,
            "seed": settings.seed,
            "promptsPerStep": settings.prompts_per_step,
            "optimizer": {"learningRate": settings.learning_rate, "arguments": {"weight_decay": 0.01}},
            "autocast": "bfloat16" if bfloat16 else "off",
        },
        "checkpoint": {"everySteps": settings.num_steps, "export": False},
        "observability": {"view": "off", "sampleTexts": 0},
    }
    return {"apiVersion": "rlhfspec.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "bench-step"}, "spec": spec}


def steps_of(lines: str) -> list[Step]:
    """Return the steps of a steps.jsonl, each timed from the end of the one before."""
    metrics = [json.loads(line) for line in lines.splitlines()]
    began = [metrics[0]["started_unix_seconds"], *(line["finished_unix_seconds"] for line in metrics)]
    return [
        Step(
            seconds=line["finished_unix_seconds"] - before,
            by_stage={name: line["seconds"][name] or 0.0 for name in STEP_PARTS if name in line["seconds"]},
            num_tokens=line["num_response_tokens"],
        )
        for line, before in zip(metrics, began, strict=False)
    ]

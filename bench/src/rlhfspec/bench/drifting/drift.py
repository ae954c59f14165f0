"""Measurement of how far a drafter falls behind a trained policy, and how learning helps.

The job runs once with a checkpoint per step. Its policies are then loaded in turn into two engines with the same
drafter, one of which learns. Both generate every step's responses with the same prompts and seeds, so the same tokens.
After a step, learning may take `share` of the run's step time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhfspec.bench.generating.ours import digest, drain
from rlhfspec.bench.generating.results import Bar, BenchResults, published
from rlhfspec.bench.processor import processor
from rlhfspec.bench.ratios import paired
from rlhfspec.bench.worker import WorkerFailed, environment
from rlhfspec.engine import Completion, Engine, Request, SamplingParams
from rlhfspec.tiny import sums
from rlhfspec.tiny.tokenizer import BOS, encode
from rlhfspec.training.checkpoint.shares import LEARNER
from rlhfspec.training.checkpoint.store import CheckpointStore

FROM_STEP, LEAST_DRIFT_GAIN, MOST_SHARE = 15, 1.2, 0.02  # tokens a verification, learning over frozen; of step time
_PROMPTS, _SAMPLES = 16, 8
_PATIENCE_SECONDS = 3600.0
FROZEN, LEARNING = "frozen", "learning"

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftSettings:
    """Settings of the benchmark. `job` trains on sums; learning may take `share` of its step time."""

    job: Path
    model: str
    draft: str
    steps: int = 30
    share: float = MOST_SHARE
    speculation: str = "adaptive"
    learning_rate: float | None = None  # of the policy, instead of the job's


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftStep:
    """Result of one mode in one step. Seconds, except `run_seconds`, are CPU time of one thread."""

    mode: str
    step: int
    num_tokens: int
    num_verifications: int
    cpu_seconds: float
    learning_seconds: float  # after the step
    run_seconds: float  # of the step in the run

    @property
    def tokens_per_verification(self) -> float:
        return self.num_tokens / self.num_verifications

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.cpu_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftResults(BenchResults):
    rows: tuple[DriftStep, ...]

    def of(self, mode: str, *, since: int = 1) -> list[DriftStep]:
        return [row for row in self.rows if row.mode == mode and row.step >= since]


def measure(settings: DriftSettings, report: Report) -> DriftResults:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        report(f"{settings.steps} steps of {settings.job} are run")
        run(settings, folder)
        rows = tuple(replayed(settings, folder, report))
    results = DriftResults(
        machine=processor(arithmetic=""), settings=published(settings, "job", "model", "draft"), rows=rows
    )
    return DriftResults(machine=results.machine, settings=results.settings, rows=rows, bars=bars_of(results))


def run(settings: DriftSettings, folder: Path) -> None:
    chosen: dict[str, Any] = {
        "training.steps": settings.steps,
        "checkpoint.everySteps": 1,
        "checkpoint.keep": settings.steps + 1,
        "checkpoint.export": "false",
        "evaluation.everySteps": settings.steps,
        "observability.view": "off",
    }
    if settings.learning_rate is not None:
        chosen["training.optimizer.learningRate"] = settings.learning_rate
    sets = [word for path, value in chosen.items() for word in ("--set", f"{path}={value}")]
    command = [sys.executable, "-m", "rlhfspec.cli.start", "run", str(settings.job), "--out", str(folder), *sets]
    ended = subprocess.run(
        command, env=os.environ | environment(2), capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False
    )
    if ended.returncode != 0:
        raise WorkerFailed(f"rlhfspec run ended with exit code {ended.returncode}:\n{ended.stderr[-2000:]}")


def replayed(settings: DriftSettings, folder: Path, report: Report) -> Iterator[DriftStep]:
    """Generate the steps of a finished run again, and yield their results; both modes take turns."""
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    run_seconds = statistics.median(line["seconds"]["step"] for line in lines)
    engines = {
        mode: Engine.from_pretrained(
            settings.model, drafter=settings.draft, num_threads=1, max_context=256, speculation=settings.speculation,
            max_sequences=_PROMPTS * _SAMPLES, learning="off" if mode == FROZEN else 0.0,
        )
        for mode in (FROZEN, LEARNING)
    }  # fmt: skip
    allowed = 0.0  # seconds for learning; unused ones carry over
    with CheckpointStore(folder / "checkpoints", keep=settings.steps + 1) as store:
        for step in range(1, len(lines) + 1):
            digests = set()
            for mode in (FROZEN, LEARNING) if step % 2 else (LEARNING, FROZEN):
                engine = engines[mode]
                if step > 1:
                    engine.load_weights(store.load(step - 1)[LEARNER]["policy"], version=step - 1)
                began = time.process_time()
                done = drain(engine, requests(step))
                seconds = time.process_time() - began
                digests.add(digest(done))
                spent = 0.0
                if mode == LEARNING:
                    allowed += settings.share * run_seconds
                    spent = learnt_for(engine, allowed)
                    allowed -= spent
                yield _row(mode, step, done, seconds, spent, run_seconds)
            assert len(digests) == 1, "a drafter changed a token"
            report(f"step {step} of {len(lines)}")


def requests(step: int) -> list[Request]:
    """Return a step's requests: 16 sums, 8 responses to each."""
    prompts = [(BOS, *encode(row["prompt"])) for row in sums.rows(_PROMPTS, seed=1000 + step)]
    return [
        Request(
            id=f"{step}/{number}/{sample}", prompt_token_ids=prompt, params=SamplingParams(max_tokens=160),
            seed=1_000_003 * step + _SAMPLES * number + sample, group=f"{step}/{number}",
        )
        for number, prompt in enumerate(prompts)
        for sample in range(_SAMPLES)
    ]  # fmt: skip


def learnt_for(engine: Engine, seconds: float) -> float:
    """Train the drafter for at most `seconds` of CPU time, in whole optimizer steps; return the seconds taken."""
    began, took, learning = time.process_time(), 0.0, engine.learning
    assert learning is not None
    while (spent := time.process_time() - began) + took < seconds and learning.learn_while_idle():
        took = max(took, time.process_time() - began - spent)
    return time.process_time() - began


def bars_of(results: DriftResults) -> tuple[Bar, ...]:
    """Return the bars on tokens per verification, learning / frozen, from step 15 on, and on learning time."""
    frozen, learning = results.of(FROZEN, since=FROM_STEP), results.of(LEARNING, since=FROM_STEP)
    if not frozen:
        return ()
    scenario = f"from step {FROM_STEP} on"
    gain = paired(
        [row.tokens_per_verification for row in learning], [row.tokens_per_verification for row in frozen]
    )  # fmt: skip
    every = results.of(LEARNING)
    share = sum(row.learning_seconds for row in every) / sum(row.run_seconds for row in every)
    name = "tokens a verification, learning / frozen"
    return (
        Bar(num_threads=1, scenario=scenario, name=name, wanted=f">= {LEAST_DRIFT_GAIN}", found=str(gain),
            holds=gain.value >= LEAST_DRIFT_GAIN),
        Bar(num_threads=1, scenario="all steps", name="learning, of step time", wanted=f"<= {MOST_SHARE:.0%}",
            found=f"{share:.1%}", holds=share <= MOST_SHARE),
    )  # fmt: skip


def _row(
    mode: str, step: int, done: list[Completion], seconds: float, learning_seconds: float, run_seconds: float
) -> DriftStep:
    return DriftStep(
        mode=mode,
        step=step,
        num_tokens=sum(len(each.token_ids) for each in done),
        num_verifications=sum(each.stats.num_verifications for each in done),
        cpu_seconds=seconds,
        learning_seconds=learning_seconds,
        run_seconds=run_seconds,
    )

"""A whole job in one process: the curve is a function of the job, however it is run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from rlhfspec.cli.main import app
from rlhfspec.telemetry.metrics import curve
from rlhfspec.tiny import random_model
from rlhfspec.tiny.tokenizer import VOCAB_SIZE, hugging_face_tokenizer
from rlhfspec.transport.base import Consumer, Message, Subscription
from rlhfspec.transport.memory import MemoryTransport

REWARDS = """
def letters(completion):
    return sum(character.isascii() and character.isalpha() for character in completion) / 8

def group(prompts, completions):
    return [len(set(completion)) / 8 for completion in completions]
"""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, and a drafter that agrees with it often enough: the policy itself."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("policy", "drafter"):
        model = random_model("llama", seed=0, vocab_size=VOCAB_SIZE)
        model.save_pretrained(folder / name)
        hugging_face_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture
def job_file(tmp_path: Path, models: Path) -> Path:
    rows = [{"prompt": f"{first}+{second}=", "answer": first + second} for first in range(6) for second in range(4)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARDS)
    return write_job(tmp_path, models)


def write_job(folder: Path, models: Path, **algorithm: Any) -> Path:
    job = {
        "apiVersion": "rlhfspec.io/v1alpha1",
        "kind": "RLHFJob",
        "metadata": {"name": "letters"},
        "spec": {
            "model": {"path": str(models / "policy"), "drafter": str(models / "drafter")},
            "dataset": {"path": "data.jsonl"},
            "algorithm": {"name": "grpo", "samplesPerPrompt": 3} | algorithm,
            "generation": {"maxTokens": 10},
            "rewards": {"sources": [{"type": "function", "function": "rewards:letters"}]},
            "training": {"steps": 3, "promptsPerStep": 3, "optimizer": {"learningRate": 1e-2}},
            "checkpoint": {"everySteps": 1, "export": False},
            "observability": {"view": "plain", "sampleTexts": 0},
        },
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def invoke(job_file: Path, out: str, *overrides: str, resume: bool = False) -> Result:
    sets = [argument for override in overrides for argument in ("--set", override)]
    resuming = ["--resume"] if resume else []
    return CliRunner().invoke(app, ["run", str(job_file), "--out", str(job_file.parent / out), *sets, *resuming])


def lines_of(job_file: Path, out: str) -> list[str]:
    return (job_file.parent / out / "steps.jsonl").read_text().splitlines()


def train(job_file: Path, out: str, *overrides: str, resume: bool = False) -> list[dict[str, Any]]:
    """The run's curve; by default without drafting."""
    given = overrides if any("speculation" in o for o in overrides) else ("generation.speculation.mode=off", *overrides)
    result = invoke(job_file, out, *given, resume=resume)
    assert result.exit_code == 0, result.output
    return [curve(line) for line in lines_of(job_file, out)]


def test_speculation_changes_nothing(job_file: Path) -> None:
    plain = train(job_file, "off")
    assert len(plain) == 3
    assert len({line["weights_digest"] for line in plain}) == 3, "every step changes the weights"
    for mode in ("suffix", "model", "adaptive"):
        assert train(job_file, mode, f"generation.speculation.mode={mode}") == plain
    drafted = [json.loads(line)["accepted_per_verification"] for line in lines_of(job_file, "model")]
    assert any(drafted), "the model drafter was really used"


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_resuming_at_every_step_continues_the_same_curve(job_file: Path, models: Path, algorithm: str) -> None:
    write_job(job_file.parent, models, name=algorithm)
    whole = train(job_file, "whole")
    for step in (1, 2, 3):
        train(job_file, "parts", f"training.steps={step}", resume=step > 1)
    assert [curve(line) for line in lines_of(job_file, "parts")] == whole


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_workers_and_arrival_order_change_nothing(
    job_file: Path, models: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(job_file.parent, models, name=algorithm, samplesPerPrompt=3)
    plain = train(job_file, "plain")
    two = [f"roles.{role}.workers=2" for role in ("generator", "reward", "reference", "critic")]
    assert train(job_file, "workers", *two) == plain
    monkeypatch.setattr("rlhfspec.cli.local.MemoryTransport", ShuffledTransport)
    assert train(job_file, "shuffled", *two) == plain


def test_generator_and_trainer_agree(job_file: Path) -> None:
    train(job_file, "run")
    differences = [json.loads(line)["log_prob_difference"]["max"] for line in lines_of(job_file, "run")]
    assert 0 < max(differences) < 1e-5
    result = invoke(job_file, "exact", "training.exactOnPolicy=true")
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["log_prob_difference"]["max"] for line in lines_of(job_file, "exact")] == [0.0] * 3
    assert "log-prob difference max 0" in result.output


class ShuffledTransport(MemoryTransport):
    """What is pulled together arrives in any order, and what could come at once comes in parts."""

    async def subscribe(self, subject: str, consumer: Consumer) -> Subscription:
        return _Shuffled(await super().subscribe(subject, consumer), random.Random(subject + consumer.name))


class _Shuffled:
    def __init__(self, inner: Subscription, draw: random.Random) -> None:
        self._inner = inner
        self._draw = draw
        self._kept: list[Message] = []

    async def pull(self, max_messages: int, timeout_seconds: float) -> list[Message]:
        wait = 0.0 if self._kept else timeout_seconds
        messages = [*self._kept, *await self._inner.pull(64, wait)]
        self._draw.shuffle(messages)
        number = 1 + self._draw.randrange(min(max_messages, 3))
        self._kept = messages[number:]
        return messages[:number]

    async def close(self) -> None:
        await self._inner.close()

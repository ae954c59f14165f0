"""A small job for tests of whole runs, and ways to run it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner, Result

from rlhfspec.cli.main import app
from rlhfspec.messages.records.metrics import curve

REWARDS = """
def letters(completion):
    return sum(character.isascii() and character.isalpha() for character in completion) / 8

def group(prompts, completions):
    return [len(set(completion)) / 8 for completion in completions]
"""


def write_models(folder: Path, model: Any) -> None:
    from rlhfspec.tiny.tokenizer import hugging_face_tokenizer

    for name in ("policy", "drafter"):
        model.save_pretrained(folder / name)
        hugging_face_tokenizer().save_pretrained(folder / name)


def write_data(folder: Path) -> None:
    rows = [{"prompt": f"{first}+{second}=", "answer": first + second} for first in range(6) for second in range(4)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)


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


def with_spec(job_file: Path, **blocks: Any) -> Path:
    """Change entries of the job's blocks."""
    job = yaml.safe_load(job_file.read_text())
    for name, entries in blocks.items():
        job["spec"][name] = job["spec"].get(name, {}) | entries
    job_file.write_text(yaml.safe_dump(job, allow_unicode=True))
    return job_file


def with_reward(job_file: Path, code: str, *, arguments: str = "completion", **fields: Any) -> Path:
    """Have the job's samples scored by a function with this body alone."""
    (job_file.parent / "other_rewards.py").write_text(f"def reward({arguments}):\n    {code}\n")
    source = {"type": "function", "function": "other_rewards:reward", "retries": 0} | fields
    return with_spec(job_file, rewards={"sources": [source]})


def command(words: Sequence[str], code: int | None = None) -> Result:
    """Run a command, which must end with this exit code."""
    result = CliRunner().invoke(app, words)
    assert code is None or result.exit_code == code, result.output + repr(result.exception)
    return result


def rlhfspec(*words: str | Path, code: int = 0) -> str:
    return command([str(word) for word in words], code).output


def invoke(job_file: Path, out: str, *overrides: str, resume: bool = False, code: int | None = None) -> Result:
    sets = [argument for override in overrides for argument in ("--set", override)]
    resuming = ["--resume"] if resume else []
    return command(["run", str(job_file), "--out", str(job_file.parent / out), *sets, *resuming], code)


def lines_of(job_file: Path, out: str) -> list[str]:
    return (job_file.parent / out / "steps.jsonl").read_text().splitlines()


def train(job_file: Path, out: str, *overrides: str, resume: bool = False) -> list[dict[str, Any]]:
    given = overrides if any("speculation" in o for o in overrides) else ("generation.speculation.mode=off", *overrides)
    invoke(job_file, out, *given, resume=resume, code=0)
    return curve_of(job_file, out)


def curve_of(job_file: Path, out: str) -> list[dict[str, Any]]:
    return [curve(line) for line in lines_of(job_file, out)]


def samples_of(job_file: Path, out: str) -> bytes:
    return (job_file.parent / out / "samples.jsonl").read_bytes()


def answers_of(run: Path) -> dict[str, list[Any]]:
    """Return what is the same for every engine of each sample of a run."""
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    found = {line["id"]: [line[name] for name in ("tokens", "text", "finish_reason", "reward")] for line in lines}
    assert len(found) == len(lines), "samples are doubled"
    return found

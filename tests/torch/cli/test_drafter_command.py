"""`rlhfspec drafter train` writes a loadable model folder."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import write_data, write_models
from typer.testing import CliRunner, Result

from rlhfspec.cli.main import app
from rlhfspec.engine import Engine, SamplingParams
from rlhfspec.engine.distilling import learning as distilling
from rlhfspec.engine.distilling.early_exit import early_exit
from rlhfspec.engine.distilling.student import Student
from rlhfspec.huggingface.loading import load_model
from rlhfspec.tiny import random_model
from rlhfspec.tiny.tokenizer import VOCAB_SIZE

PROMPTS = [[65, 66, 67], [70, 71]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(distilling, "LESSON_TOKENS", 64)
    write_models(tmp_path, random_model("llama", seed=3, vocab_size=VOCAB_SIZE, num_layers=4))
    write_data(tmp_path)
    return tmp_path


def train(place: Path, *given: str, model: str = "policy", data: str = "data.jsonl", out: str = "made") -> Result:
    files = ["--data", str(place / data), "--out", str(place / out)]
    small = ["--max-tokens", "24", "--tokens", "300"]
    return CliRunner().invoke(app, ["drafter", "train", str(place / model), *files, *small, *given])


def generated(place: Path, drafter: Path | str | None) -> list[Any]:
    engine = Engine.from_pretrained(
        place / "policy", drafter=drafter, speculation="off" if drafter is None else "model", profile=False,
        max_sequences=4, max_context=64, num_threads=1,
    )  # fmt: skip
    done = engine.generate(PROMPTS * 4, SamplingParams(max_tokens=40, ignore_eos=True))
    return [(each.token_ids, each.log_probs) for each in done]


def test_a_drafter_is_made_and_changes_no_token(place: Path) -> None:
    result = train(place, "--tokens", "3000")
    assert result.exit_code == 0, result.output
    last = result.stdout.splitlines()[-1]
    assert "made: learnt from 3," in last
    assert last.endswith(" tokens a verification")
    made = load_model(place / "made")
    assert made.config.num_hidden_layers == 2
    assert made.config.vocab_size == VOCAB_SIZE
    assert generated(place, None) == generated(place, "auto") == generated(place, place / "made")


def test_transformers_gives_the_logits_of_what_drafts(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    learnt: list[Student] = []
    genuine = Student.learn

    def learn(self: Student, lessons: Any) -> float:
        learnt[:] = [self]
        return genuine(self, lessons)

    monkeypatch.setattr(Student, "learn", learn)
    assert train(place).exit_code == 0
    tokens = torch.tensor([[65, 66, 67, 68, 69]])
    with torch.inference_mode():
        found = AutoModelForCausalLM.from_pretrained(place / "made")(tokens).logits
        assert torch.equal(found, learnt[0].model(tokens).logits)
        assert not torch.equal(found, early_exit(load_model(place / "policy"))(tokens).logits)


def test_ctrl_c_leaves_a_whole_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = Student.learn

    def learn(self: Student, lessons: Any) -> float:
        os.kill(os.getpid(), signal.SIGINT)
        return genuine(self, lessons)

    monkeypatch.setattr(Student, "learn", learn)
    result = train(place, "--tokens", "1000000000", "--seconds", "1000000")
    assert result.exit_code == 0, result.output
    assert "made: learnt from" in result.stdout
    assert load_model(place / "made").config.num_hidden_layers == 2
    assert not list(place.glob(".writing*"))


def test_time_is_a_limit_too(place: Path) -> None:
    result = train(place, "--seconds", "0")
    assert result.exit_code == 0, result.output
    assert "learnt from 0 tokens" in result.stdout


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"out": "policy"}, "--out: is there already"),
        ({"out": "data.jsonl"}, "--out: is there already"),
        ({"data": "none.jsonl"}, "none.jsonl"),
        ({"data": "rewards.py"}, "rewards.py"),
        ({"model": "none"}, "none"),
        ({"column": "text"}, "--column: "),
        ({"drafter": "none"}, "none"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(place: Path, given: dict[str, str], said: str) -> None:
    options = [word for name in ("column", "drafter") if name in given for word in (f"--{name}", given[name])]
    named = {name: given[name] for name in ("model", "data", "out") if name in given}
    before = sorted(place.iterdir())
    result = train(place, *options, **named)
    assert result.exit_code in (1, 2)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    problem = [line for line in result.stderr.splitlines() if not line.startswith(("reading", "loading"))]
    assert len(problem) <= 2, problem
    assert said in problem[-1]
    assert sorted(place.iterdir()) == before

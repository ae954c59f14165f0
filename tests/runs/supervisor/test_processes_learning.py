"""A drafter that learns while the run goes on: the same curve and samples, in one process and in many."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import train, write_job, write_models
from scraping import OF_LEARNING, Scraper, names_of
from started import Started, eventually, hold_rewards

from rlhfspec.engine.distilling.student import Student
from rlhfspec.tiny import random_model
from rlhfspec.tiny.tokenizer import VOCAB_SIZE

LEARNING = (
    "generation.speculation.mode=model",
    "generation.speculation.learning=share",
    "generation.speculation.learningShare=1.0",
)
AUTO = (*LEARNING, "model.drafter=auto")


@pytest.fixture(scope="module")
def deep_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deep-models")
    write_models(folder, random_model("llama", seed=0, vocab_size=VOCAB_SIZE, num_layers=3))
    return folder


def samples_of(job_file: Path, out: str) -> bytes:
    return (job_file.parent / out / "samples.jsonl").read_bytes()


def test_learning_changes_nothing(
    job_file: Path, deep_models: Path, starting: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(job_file.parent, deep_models)
    plain = train(job_file, "plain")
    lessons: list[int] = []
    genuine = Student.learn

    def learn(self: Student, given: Any) -> float:
        lessons.append(len(given))
        return genuine(self, given)

    monkeypatch.setattr(Student, "learn", learn)
    for out, overrides in (("given", LEARNING), ("auto", AUTO)):
        lessons.clear()
        assert train(job_file, out, *overrides) == plain
        assert samples_of(job_file, out) == samples_of(job_file, "plain")
        assert sum(lessons) > 9, "what the first step verified at least"
    hold = hold_rewards(job_file)
    run = starting("processes", *AUTO)
    run.until("(5 of 5)")
    scraper = Scraper(run.folder / "processes" / "connections.json")
    scraper.look()
    eventually(lambda: names_of([scraper.ask()]) >= OF_LEARNING, "what learning costs and brings is served")
    hold.unlink()
    code, output = run.ended()
    assert code == 0, output
    assert run.curve() == plain
    assert samples_of(job_file, "processes") == samples_of(job_file, "plain")

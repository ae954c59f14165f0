"""A learning drafter changes neither curve nor samples, in one process or many."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import command, samples_of, train, write_models
from scraping import OF_LEARNING, Scraper, names_of
from started import Started, eventually, hold_rewards

from rlhfspec.engine.distilling.eagle_student import EagleStudent
from rlhfspec.engine.distilling.learning import DraftLearning
from rlhfspec.huggingface.heads.eagle import load_head, new_head, save_head
from rlhfspec.runs.folder.learnt import LEARNT, learnt_lines
from rlhfspec.tiny import random_model
from rlhfspec.tiny.tokenizer import VOCAB_SIZE
from rlhfspec.training.checkpoint.learnt import LEARNT_FILE, read_learnt, write_learnt

LEARNING = (
    "generation.speculation.mode=model",
    "generation.speculation.learning=share",
    "generation.speculation.learningShare=1.0",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deep")
    write_models(folder, policy := random_model("llama", seed=0, vocab_size=VOCAB_SIZE, num_layers=8))
    shutil.rmtree(folder / "drafter")
    save_head(new_head(policy, 100), folder / "drafter")
    return folder


def test_learning_drafters_do_not_change_the_curve(
    job_file: Path, starting: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(job_file, "plain")
    lessons: list[int] = []
    genuine = EagleStudent.learn

    def learn(self: EagleStudent, given: Any) -> float:
        lessons.append(len(given))
        return genuine(self, given)

    monkeypatch.setattr(EagleStudent, "learn", learn)
    assert train(job_file, "learning", *LEARNING) == plain
    assert samples_of(job_file, "learning") == samples_of(job_file, "plain")
    assert sum(lessons) > 9, "what the first step verified at least"
    hold = hold_rewards(job_file)
    run = starting("processes", *LEARNING)
    run.until("(5 of 5)")
    scraper = Scraper(run.folder / "processes" / "connections.json")
    scraper.look()
    eventually(lambda: names_of([scraper.ask()]) >= OF_LEARNING, "what learning costs and brings is served")
    hold.unlink()
    run.ends()
    run.check_alike(plain, "plain")


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("found", ["whole", "missing", "damaged", "another's"])
def test_a_resumed_run_has_the_same_curve_with_or_without_a_learnt_drafter(
    job_file: Path, found: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(job_file, "plain")
    train(job_file, "run", *LEARNING, "training.steps=2")
    file = job_file.parent / "run" / LEARNT / LEARNT_FILE
    version = (read_learnt(file.parent) or (0,))[0]
    assert version > 0
    assert {line.weights_version for line in learnt_lines(job_file.parent / "run")} >= {0, 1}
    took: list[int] = []
    genuine = DraftLearning.take

    def take(self: DraftLearning, learnt: Any) -> bool:
        took.append(learnt.version)
        return genuine(self, learnt)

    monkeypatch.setattr(DraftLearning, "take", take)
    if found == "missing":
        file.unlink()
    elif found == "damaged":
        content = bytearray(file.read_bytes())
        content[-7] ^= 1
        file.write_bytes(content)
    elif found == "another's":
        write_learnt(file.parent, version, {"weight": torch.ones(3)}, by="generator-0")
    caplog.clear()
    assert train(job_file, "run", *LEARNING, "training.steps=3", resume=True) == plain
    assert samples_of(job_file, "run") == samples_of(job_file, "plain")
    assert took[:1] == ([version] if found in ("whole", "another's") else [])
    if found == "whole":
        for words in (["report"], ["export", "--out", str(job_file.parent / "exported")]):
            command(["drafter", words[0], str(job_file.parent / "run"), *words[1:]], 0)
        load_head(job_file.parent / "exported")
    said = [r.getMessage() for r in caplog.records if "drafter" in r.getMessage() and r.levelname == "WARNING"]
    assert len(said) == (found in ("damaged", "another's")), said


@pytest.mark.whole("whole runs in which processes are killed, one after the other")
def test_restarted_generator_goes_on_with_the_learnt_drafter(job_file: Path, starting: Callable[..., Started]) -> None:
    plain = train(job_file, "plain")
    hold = hold_rewards(job_file)
    run = starting("killed", *LEARNING)
    run.until("(5 of 5)")
    eventually((run.folder / LEARNT / LEARNT_FILE).exists, "what was learnt is there")
    os.kill(run.pid_of("generator"), signal.SIGKILL)
    logs = run.folder / "logs"
    said = "loaded a drafter that learnt"
    eventually(lambda: any(said in file.read_text() for file in logs.glob("*generator*")), "the next one takes it")
    hold.unlink()
    run.ends()
    run.check_alike(plain, "plain")

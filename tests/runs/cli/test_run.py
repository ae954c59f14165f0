"""The curve of a job in one process does not depend on the way it is run."""

import json
from pathlib import Path

import pytest
from runs import curve_of, invoke, lines_of, train, write_job
from shuffled import ShuffledTransport


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
    assert curve_of(job_file, "parts") == whole


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

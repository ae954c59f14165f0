"""A run ends where its policy collapses, if asked to; a resumed one may go on, at another learning rate too."""

from pathlib import Path

import pytest
from runs import curve_of, invoke, train

from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.runs.view import learning_signs

EVALUATE = ("evaluation.everySteps=2", "evaluation.numPrompts=5", "training.steps=5")
STOP = ("training.stopOnCollapse=true", "generation.speculation.mode=off", *EVALUATE)


def test_run_ends_with_a_checkpoint_where_its_policy_collapses(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(job_file, "whole", *EVALUATE)
    for number in ("_LEFT_SHARE", "_OF_EXPECTED"):  # so that any policy counts as one that collapses
        monkeypatch.setattr(learning_signs, number, 99.0)
    monkeypatch.setattr(learning_signs, "_FEWEST_ANSWERS", 5)
    said = invoke(job_file, "run", *STOP, "checkpoint.everySteps=100", code=0).output
    folder = RunFolder(job_file.parent / "run")
    assert curve_of(job_file, "run") == whole[:2], "the evaluation before training is the measure"
    assert folder.checkpoint(2).is_dir()
    manifest = folder.manifest()
    assert (manifest.outcome, manifest.num_steps) == ("completed", 2)
    assert manifest.reason.startswith("the policy collapses: ")
    assert manifest.reason.endswith("(training.stopOnCollapse is true; set it to false to continue)")
    assert f"completed after 2 steps: {manifest.reason}" in said
    invoke(job_file, "run", *STOP, resume=True, code=0)
    assert len(folder.steps()) == 2, "it has collapsed still"
    invoke(job_file, "run", *STOP[1:], resume=True, code=0)
    assert curve_of(job_file, "run") == whole


def test_a_resumed_run_learns_at_another_rate_from_there_on(job_file: Path) -> None:
    rate = "training.optimizer.learningRate"
    before = train(job_file, "run", "training.steps=2", "checkpoint.keep=1")
    after = train(job_file, "run", f"{rate}=1e-30", "algorithm.klCoefficient=0.1", resume=True)
    assert after[:2] == before
    assert after[2]["learning_rate"] == 1e-30
    assert after[2]["weights_digest"] == before[1]["weights_digest"], "the optimizer has it too, from its first update"
    assert after[2]["kl"] is not None
    summary = RunFolder(job_file.parent / "run").summary_file.read_text()
    assert f"| changed | spec.{rate} from 0.01 to 1e-30 after step 2 |" in summary

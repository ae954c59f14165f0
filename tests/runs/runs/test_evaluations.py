"""Held-out prompts are never trained on, answered by the policy they judge, and leave the curve unchanged."""

import json
from pathlib import Path

import pytest
from runs import command, curve_of, train

from rlhfspec.messages.records.evaluations import best
from rlhfspec.runs.folder.run_folder import RunFolder

EVALUATE = ("evaluation.everySteps=2", "evaluation.numPrompts=5", "training.steps=5", "checkpoint.everySteps=100")


def test_prompts_that_are_held_out_are_never_trained_on(job_file: Path) -> None:
    train(job_file, "run", *EVALUATE, "observability.byColumn=answer")
    folder = RunFolder(job_file.parent / "run")
    for line in (*folder.steps(), *folder.evaluations()):
        weighed = sum(line.reward_by_column[value] * count for value, count in line.num_by_column.items())
        assert weighed / line.num_samples == pytest.approx(line.reward.mean), "each sample by its row's answer"
    held_out = {line["prompt"] for line in folder.evaluation_samples()}
    assert len(held_out) == 5
    assert not held_out & {line["prompt"] for line in folder.samples()}
    assert [run.step for run in folder.evaluations()] == [0, 2, 4, 5]
    for run in folder.evaluations():
        lines = [line for line in folder.evaluation_samples() if line["step"] == run.step]
        assert {line["weights_version"] for line in lines} == {run.step}, "by no other policy"
        assert run.reward.mean == pytest.approx(sum(line["reward"] for line in lines) / len(lines))


def test_an_evaluation_leaves_no_trace_in_the_curve(job_file: Path, tmp_path: Path) -> None:
    plain = train(job_file, "plain", "training.steps=5")
    rows = [{"prompt": f"{number}+{number}=", "answer": 2 * number} for number in range(4)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    two = [f"roles.{role}.workers=2" for role in ("generator", "reward", "reference")]
    given = (*EVALUATE, "evaluation.path=held_out.jsonl", "evaluation.samplesPerPrompt=2")
    for out, more in (("one", []), ("two", [*two, "training.maxStaleness=0"])):
        assert train(job_file, out, *given, *more) == plain
        samples = list(RunFolder(job_file.parent / out).evaluation_samples())
        assert len(samples) == 4 * 4 * 2, "the whole file, though more were asked for"
    first, second = ((job_file.parent / out / "evaluation_samples.jsonl").read_text() for out in ("one", "two"))
    assert first == second


def test_a_resumed_run_evaluates_missing_steps_and_none_twice(job_file: Path) -> None:
    whole = train(job_file, "whole", *EVALUATE)
    for steps in (2, 3, 5):
        train(job_file, "parts", *EVALUATE, f"training.steps={steps}", resume=steps > 2)
    assert curve_of(job_file, "parts") == whole
    folder = RunFolder(job_file.parent / "parts")
    assert [run.step for run in folder.evaluations()] == [0, 2, 3, 4, 5], "3 was an end"
    samples = [line["id"] for line in folder.evaluation_samples()]
    assert len(samples) == len(set(samples)) == 5 * 5


def test_the_best_checkpoint_is_kept(job_file: Path) -> None:
    train(job_file, "run", *EVALUATE, "checkpoint.keep=1", "training.optimizer.learningRate=0.05")
    folder = RunFolder(job_file.parent / "run")
    top = best(folder.evaluations()).step
    assert top in (2, 4), "neither before training nor the last"
    assert {int(path.name.removeprefix("step-")) for path in folder.checkpoints.glob("step-*")} == {top, 5}


def test_the_best_checkpoint_is_exported_unless_another_is_asked_for(job_file: Path) -> None:
    export = ("checkpoint.export=true", "training.optimizer.learningRate=0.05")
    train(job_file, "run", *EVALUATE, *export, "checkpoint.keep=1")
    folder = RunFolder(job_file.parent / "run")
    top = best([run for run in folder.evaluations() if run.step]).step
    assert top < 5, "the last is not the best"
    assert f"exported policy | step {top}, the best " in folder.summary_file.read_text()
    written = {step: exported_weights(folder, *words) for step, words in ((top, []), (5, ["--step", "last"]))}
    assert written[top] == weights_in(folder.export) != written[5]
    train(job_file, "to-the-top", *EVALUATE, *export, f"training.steps={top}")
    assert weights_in(job_file.parent / "to-the-top" / "export") == written[top]
    refused = command(["export", str(folder.path), "--step", "1"], 2).output
    assert f"--step: must be last, or a step with a checkpoint: {top}, 5" in refused


def test_a_later_export_merges_a_low_rank_update_as_the_run_does(job_file: Path) -> None:
    train(job_file, "run", "checkpoint.export=true", "model.lora={}")
    folder = RunFolder(job_file.parent / "run")
    assert exported_weights(folder) == weights_in(folder.export)


def exported_weights(folder: RunFolder, *words: str) -> dict[str, bytes]:
    out = folder.path.parent / "written"
    assert f"{out}: step " in command(["export", str(folder.path), *words, "--out", str(out)], 0).output
    return weights_in(out)


def weights_in(folder: Path) -> dict[str, bytes]:
    from safetensors.torch import load_file

    return {name: tensor.numpy().tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}


def test_evaluations_score_whole_groups_for_a_batched_reward(job_file: Path) -> None:
    overrides = ["rewards.sources[0].function=rewards:group", "rewards.sources[0].batched=true"]
    train(job_file, "run", *EVALUATE, *overrides, "evaluation.samplesPerPrompt=2")
    assert RunFolder(job_file.parent / "run").evaluations()[0].num_samples == 10


def test_validate_refuses_evaluation_settings_that_a_run_would_refuse(job_file: Path) -> None:
    def said(*overrides: str) -> str:
        sets = [argument for override in overrides for argument in ("--set", override)]
        return command(["validate", str(job_file), *sets], 2).output

    assert "spec.evaluation.path: " in said("evaluation.path=held.jsonl")
    assert "spec.evaluation.numPrompts: must be < 24" in said("evaluation.numPrompts=24")

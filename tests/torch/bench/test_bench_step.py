"""The benchmark of a whole step: comparisons, refusals, and a real run of our side."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rlhfspec.bench.commands import bench
from rlhfspec.bench.rivals.trl_worker import _step
from rlhfspec.bench.stepping import step as bench_step
from rlhfspec.bench.stepping.report import render
from rlhfspec.bench.stepping.results import Step, UnequalWork
from rlhfspec.bench.stepping.step import Measure, StepBenchmark, StepSettings
from rlhfspec.bench.worker import WorkerFailed
from rlhfspec.errors import InvalidRequest
from rlhfspec.job import RLHFJob
from rlhfspec.tiny.tokenizer import hugging_face_tokenizer

SETTINGS = StepSettings(model="m/target-1", draft="m/draft-1", steps=2, repeats=3, num_tokens=8)


def scripted(seconds: float, *, num_tokens: int = 128) -> Measure:
    warm_up = Step(seconds=50.0, by_stage={"generation": 50.0}, num_tokens=num_tokens)
    step = Step(seconds=seconds, by_stage={"generation": seconds / 2, "training": seconds / 2}, num_tokens=num_tokens)
    return lambda settings: [warm_up] + [step] * settings.steps


def failing(_: StepSettings) -> list[Step]:
    raise WorkerFailed("no TRL here\nand a long story")


def ran(**measures: Measure) -> Any:
    messages: list[str] = []
    results = StepBenchmark(replace(SETTINGS, modes=tuple(measures)), messages.append, measures=measures).run()
    return results, messages


def test_rows_are_medians_without_the_warm_up_and_ratios_are_against_trl(capsys: pytest.CaptureFixture[str]) -> None:
    results, messages = ran(trl=scripted(6.0), plain=scripted(2.0), adaptive=scripted(1.5))
    assert [(row.mode, row.seconds_per_step, len(row.steps)) for row in results.rows] == [
        ("trl", 6.0, 6),
        ("plain", 2.0, 6),
        ("adaptive", 1.5, 6),
    ]
    assert results.row("plain").by_stage == {"generation": 1.0, "training": 1.0}
    turns = [message.split(": ")[1] for message in messages if "took" not in message]
    assert turns == ["trl", "plain", "adaptive", "plain", "adaptive", "trl", "adaptive", "trl", "plain"]  # interleaved
    written = json.loads(results.to_json())
    assert written["times_as_fast_as_trl"] == {"plain": 3.0, "adaptive": 4.0}
    assert {"mode", "seconds_per_step", "by_stage"} <= written["rows"][0].keys()
    assert written["settings"]["model"] == "target-1"  # no path of the machine
    Console(width=150).print(render(results))
    shown = capsys.readouterr().out
    [line] = [line for line in shown.splitlines() if "adaptive / TRL" in line]
    assert line.replace("│", " ").split() == ["✓", "2", "step", "adaptive", "/", "TRL", ">=", "2.00", "4.00"]
    assert [(bar["name"], bar["holds"]) for bar in written["bars"]] == [("plain / TRL", True), ("adaptive / TRL", True)]


def test_a_missing_rival_is_named_once_and_ours_go_on() -> None:
    results, messages = ran(trl=failing, plain=scripted(2.0))
    assert results.skipped == ("trl: no TRL here",)
    assert [row.mode for row in results.rows] == ["plain"]
    assert results.times_as_fast("plain") is None
    assert messages.count("trl is left out: no TRL here") == 1
    with pytest.raises(WorkerFailed):  # ours must work
        ran(plain=failing)


def test_unequal_lengths_are_refused() -> None:
    ran(trl=scripted(6.0, num_tokens=128), plain=scripted(2.0, num_tokens=130))
    with pytest.raises(UnequalWork, match=r"trl 128, plain 132"):
        ran(trl=scripted(6.0, num_tokens=128), plain=scripted(2.0, num_tokens=132))


@pytest.mark.parametrize(
    ("field", "value"), [("modes", ("verl",)), ("samples_per_prompt", 1), ("steps", 0), ("num_threads", 0)]
)
def test_impossible_settings_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=field):
        replace(SETTINGS, **{field: value})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_job_is_valid_and_says_what_trl_is_told(dtype: str) -> None:
    settings = replace(SETTINGS, dtype=dtype, kl_coefficient=0.1, learning_rate=2e-6)
    job = RLHFJob.model_validate(bench_step.job_of(settings, "adaptive"))
    told = bench_step._trl_arguments(settings, "folder")
    assert job.spec.generation.ignore_eos
    assert job.spec.algorithm.kl_coefficient == told["beta"]
    assert job.spec.training.optimizer.learning_rate == told["learning_rate"]
    assert job.spec.training.steps == told["steps"] == 3
    assert len(told["prompts"]) == len(set(told["prompts"])) == 3 * settings.prompts_per_step
    assert (job.spec.training.autocast == "bfloat16") == (dtype == "bfloat16")


def test_trl_stages_add_up_to_the_step() -> None:
    calls = {"_generate": 3.0, "_calculate_rewards": 0.5, "_generate_and_score_completions": 5.0}
    step = _step({"seconds": 9.0, "calls": calls, "num_tokens": 16})
    assert step["by_stage"] == {"generation": 3.0, "reward": 0.5, "reference": 1.5, "training": 4.0}


def test_a_python_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench_step.find_trl_python(None) is None
    assert bench_step.find_trl_python(sys.executable) == Path(sys.executable)
    answer = CliRunner().invoke(bench.app, ["step", "--model", "nowhere", "--draft", "nowhere"])
    assert answer.exit_code == 2
    with pytest.raises(InvalidRequest, match="trl_python"):
        bench_step.find_trl_python("/no/such/python")


def test_long_prompts_are_of_one_length_and_all_different(tmp_path: Path) -> None:
    settings = replace(SETTINGS, **bench.LONG_PROMPTS)
    texts, encode = settings.prompts(), hugging_face_tokenizer()
    assert {len(encode(text)["input_ids"]) for text in texts} == {768}
    assert len(set(texts)) == settings.num_steps * settings.prompts_per_step
    job = RLHFJob.model_validate(bench_step.job_of(settings, "off"))
    assert job.spec.dataset.max_prompt_tokens == 768, "none of them is left out"
    assert job.spec.algorithm.samples_per_prompt == 16
    with pytest.raises(InvalidRequest, match="num_prompt_tokens"):
        replace(SETTINGS, num_prompt_tokens=1)


def test_ppo_is_ours_alone_and_trains_a_critic(tmp_path: Path) -> None:
    settings = replace(SETTINGS, algorithm="ppo")
    job = RLHFJob.model_validate(bench_step.job_of(settings, "off"))
    assert job.spec.algorithm.name == "ppo"
    assert job.spec.algorithm.kl_coefficient == settings.kl_coefficient
    with pytest.raises(WorkerFailed, match=r"TRL 1\.16 trains no ppo"):
        bench_step.measure_trl(settings)
    with pytest.raises(InvalidRequest, match="algorithm"):
        replace(SETTINGS, algorithm="dpo")

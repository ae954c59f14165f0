"""`rlhfspec simulate`: table, picture, JSON, calibration by a run, and refusals."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from places import ROOT
from typer.testing import CliRunner, Result

from rlhfspec.cli.main import app
from rlhfspec.simulator.calibrate import Ran, as_spans, workload_of
from rlhfspec.simulator.lengths import workload
from rlhfspec.simulator.scenario import Scenario
from rlhfspec.simulator.step_curves import PRESETS
from rlhfspec.telemetry.spans import Attribute, Span

JOB = str(ROOT / "examples" / "grpo.yaml")
SMALL = ("--generators", "4", "--per-generator", "8", "--seeds", "2")


def simulated(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", JOB, *arguments])


def content(*arguments: str) -> dict[str, object]:
    result = simulated(*arguments, "--json")
    assert result.exit_code == 0, result.output
    read = json.loads(result.stdout)
    assert isinstance(read, dict)
    return read


def test_the_table_has_every_policy_and_the_picture_is_drawn(tmp_path: Path) -> None:
    result = simulated(*SMALL, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    for name in ("none", "threshold", "knee", "counts", "ours", "pull+none", "pull+ours", "ours-knowing"):
        assert f" {name} " in result.stdout
    assert (tmp_path / "simulated.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_seeds_give_the_same_json() -> None:
    arguments = (*SMALL, "--policy", "ours", "--policy", "pull+none", "--set", "generation.maxTokens=300")
    first = content(*arguments)
    assert first == content(*arguments)
    assert first["simulated"] is True
    assert first["generators"] == 4
    assert [trial["policy"] for trial in first["trials"]] == ["ours", "pull+none"]  # type: ignore[attr-defined]


def test_slow_machines_and_deaths_take_time() -> None:
    seconds = [
        content(*SMALL, "--policy", "none", *more)["trials"][0]["mean_seconds"]  # type: ignore[index]
        for more in ((), ("--slow", "0:3"), ("--kill", "1@0.2+5"))
    ]
    assert seconds[0] < min(seconds[1:])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policy", "our"), "did you mean ours?"),
        (("--curve", "fast"), "must be one of plain, adaptive"),
        (("--lengths", "group"), "did you mean groups?"),
        (("--kill", "9@1"), "a generator of 0 to 3"),
        (("--slow", "0"), "GENERATOR:TIMES"),
        (("--calibrate", "nowhere"), "is no run's folder"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: tuple[str, str], said: str) -> None:
    result = simulated(*SMALL, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def parts_of(whole: Span) -> list[Span]:
    middle, tokens = (whole.began + whole.ended) / 2, int(whole.attributes["tokens"])
    told: dict[str, Attribute] = {"generator": whole.attributes["generator"]}
    rest: dict[str, Attribute] = {"tokens": tokens - tokens // 2, "finish_reason": "stop"}
    return [
        replace(whole, ended=middle, attributes=told | {"tokens": tokens // 2}),
        replace(whole, began=middle, stay=2, attributes=told | rest),
        replace(whole, delivery=2, is_open=True, ended=middle, attributes=told),  # a generator that died with it
    ]


def test_a_samples_parts_are_one_sample_of_the_simulated_stage() -> None:
    whole = Ran(sample="a", generator="0", prompt="p", step=1, began=0.0, ended=4.0, num_tokens=40, prompt_tokens=5)
    parts = [replace(whole, num_tokens=15), replace(whole, num_tokens=25, generator="1", prompt_tokens=0)]
    one, several = (workload_of(each, num_generators=2, seed=1) for each in ([whole], parts))
    assert one.lengths.tolist() == several.lengths.tolist() == [40]
    assert one.prompt_tokens.tolist() == several.prompt_tokens.tolist()


def test_it_is_calibrated_by_what_a_run_left(tmp_path: Path) -> None:
    scenario = Scenario(num_generators=2, curve=PRESETS["t0=2.5c"], prefill_seconds=5e-4)
    samples = as_spans(scenario, workload("groups", num_generators=2, per_generator=32, seed=1))
    (tmp_path / "traces").mkdir()
    lines, spans = [], []
    for place, sample in enumerate(samples):
        name = f"sums/1/{sample.prompt}/{place}"
        lines.append(json.dumps({"id": name, "step": 1, "prompt": "word " * sample.prompt_tokens}) + "\n")
        span = Span(
            run="r", sample=name, name="generation", stage="generator", worker=0, step=1, began=sample.began,
            ended=sample.ended, attributes={"generator": sample.generator, "tokens": sample.num_tokens},
        )  # fmt: skip
        spans += [part.to_line() for part in ([span] if place % 4 else parts_of(span))]
    (tmp_path / "samples.jsonl").write_text("".join(lines))
    (tmp_path / "traces" / "generator-0.jsonl").write_text("".join(spans))
    found = content("--seeds", "1", "--policy", "none", "--calibrate", str(tmp_path))["calibration"]
    assert found["samples"] == 64 + 16  # type: ignore[index]
    assert found["sequence_seconds"] == pytest.approx(0.5e-3, rel=0.1)  # type: ignore[index]
    assert found["median_error"] < 0.05  # type: ignore[index]

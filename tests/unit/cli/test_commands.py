import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from run_folders import a_run, example_job
from runs import command, rlhfspec
from typer.main import get_command
from typer.testing import CliRunner, Result
from views import printed

from rlhfspec.cli.main import app
from rlhfspec.cli.signals import name_of_last, on_signals
from rlhfspec.job.choices.algorithms import ALGORITHMS
from rlhfspec.job.file import read_job
from rlhfspec.runs.folder.learnt import LEARNT, LearntLine, append_learnt_line, learnt_lines
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.runs.view.waterfall import bar, slowest_table, waterfall
from rlhfspec.simulator.calibrate import Ran, as_spans, workload_of
from rlhfspec.simulator.lengths import workload
from rlhfspec.simulator.scenario import Scenario
from rlhfspec.simulator.step_curves import PRESETS
from rlhfspec.telemetry.folder import SpanFiles
from rlhfspec.telemetry.read import Life, lives
from rlhfspec.telemetry.spans import Attribute, Span


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 20)
    return tmp_path


def init(folder: Path, *options: str) -> Path:
    job = folder / "job.yaml"
    rlhfspec("init", job, "--model", "./model", "--data", "./train.jsonl", *options)
    return job


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_init_writes_a_valid_job(folder: Path, algorithm: str) -> None:
    output = rlhfspec("validate", init(folder, "--algorithm", algorithm))
    assert f"algorithm   {algorithm}" in output
    assert "20 rows" in output
    assert "rewards     1 * rewards:" in output


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_commented_fields_of_init_hold_the_defaults(folder: Path, algorithm: str) -> None:
    """Uncommenting all fields changes only blocks that are off by default."""
    job = init(folder, "--algorithm", algorithm)
    full = folder / "full.yaml"
    full.write_text(re.sub(r"(?m)^( *)#(?=[a-z])", r"\1", job.read_text()))
    both = [read_job(path).model_dump() for path in (job, full)]
    for resolved in both:
        resolved["spec"].pop("evaluation")
        resolved["spec"]["model"].pop("lora")
        resolved["spec"]["observability"].pop("wandb")
    assert both[0] == both[1]
    assert len(full.read_text().splitlines()) == len(job.read_text().splitlines())


def test_init_does_not_overwrite_files_without_force(folder: Path) -> None:
    (folder / "rewards.py").write_text("def exact(completion): return 1.0\n")
    job = init(folder)
    assert "return 1.0" in (folder / "rewards.py").read_text()
    job.write_text("mine")
    assert "--force" in rlhfspec("init", job, code=2)
    assert job.read_text() == "mine"
    init(folder, "--force")
    assert "RLHFJob" in job.read_text()


def test_the_reward_written_by_init_compares_answers(folder: Path) -> None:
    init(folder)
    scope: dict[str, object] = {}
    exec((folder / "rewards.py").read_text(), scope)
    exact = scope["exact"]
    assert callable(exact)
    assert [exact(completion="answer 12 ", answer=12), exact(completion="answer 3", answer="12")] == [1.0, 0.0]


@pytest.mark.parametrize(("args", "fix"), [(("--algorithm", "grop"), "must be one of ppo"), ((), "does not exist")])
def test_init_refuses_an_unknown_algorithm_or_missing_folder(tmp_path: Path, args: tuple[str, ...], fix: str) -> None:
    assert fix in rlhfspec("init", tmp_path / "none" / "job.yaml", *args, code=2)


def test_a_job_written_by_init_without_arguments_is_valid(tmp_path: Path) -> None:
    rlhfspec("init", tmp_path / "job.yaml")
    assert "tiny:sums.jsonl (not read" in rlhfspec("validate", tmp_path / "job.yaml")
    wrong = rlhfspec("validate", tmp_path / "job.yaml", "--set", "model.drafter=tiny:sum", code=2)
    assert "spec.model.drafter: must be tiny: followed by one of" in wrong


def test_init_derives_the_name_of_the_job_from_the_file(folder: Path) -> None:
    odd = folder / "My Run_2.yaml"
    rlhfspec("init", odd, "--model", "./model", "--data", "./train.jsonl")
    assert read_job(odd).metadata.name == "my-run-2"


def test_validate_remarks_and_takes_overrides(folder: Path) -> None:
    sets = ("--set", "dataset.epochs=1", "--set", "training.steps=3", "--set", "generation.topK=5")
    output = rlhfspec("validate", init(folder), *sets)
    assert "training    3 steps" in output
    assert "remark: the data ends after step 1 of 3" in output
    assert "remark: generation.topK" in output


def test_schema_prints_a_json_schema_without_unknown_fields() -> None:
    assert json.loads(rlhfspec("schema"))["properties"]["spec"]["additionalProperties"] is False


JOB = str(ROOT / "examples" / "grpo.yaml")
SMALL = ("--generators", "4", "--per-generator", "8", "--seeds", "2")


def simulated(*arguments: str, code: int = 0) -> Result:
    return command(["simulate", JOB, *arguments], code)


def content(*arguments: str) -> dict[str, Any]:
    return json.loads(simulated(*arguments, "--json").stdout)


def test_simulate_lists_every_policy_and_draws_a_picture(tmp_path: Path) -> None:
    result = simulated(*SMALL, "--out", str(tmp_path))
    for name in ("none", "threshold", "knee", "counts", "ours", "pull+none", "pull+ours", "ours-knowing"):
        assert f" {name} " in result.stdout
    assert (tmp_path / "simulated.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_seeds_give_the_same_json() -> None:
    arguments = (*SMALL, "--policy", "ours", "--policy", "pull+none", "--set", "generation.maxTokens=300")
    first = content(*arguments)
    assert first == content(*arguments)
    assert first["simulated"] is True
    assert first["generators"] == 4
    assert [trial["policy"] for trial in first["trials"]] == ["ours", "pull+none"]


def test_slow_machines_and_killed_generators_lengthen_the_stage() -> None:
    harmed = ((), ("--slow", "0:3"), ("--kill", "1@0.2+5"))
    seconds = [content(*SMALL, "--policy", "none", *more)["trials"][0]["mean_seconds"] for more in harmed]
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
def test_impossible_arguments_of_simulate_are_refused_in_one_line(arguments: tuple[str, str], said: str) -> None:
    result = simulated(*SMALL, *arguments, code=2)
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


def test_stays_of_a_moved_sample_become_one_simulated_sample() -> None:
    whole = Ran(sample="a", generator="0", prompt="p", step=1, began=0.0, ended=4.0, num_tokens=40, prompt_tokens=5)
    parts = [replace(whole, num_tokens=15), replace(whole, num_tokens=25, generator="1", prompt_tokens=0)]
    one, several = (workload_of(each, num_generators=2, seed=1) for each in ([whole], parts))
    assert one.lengths.tolist() == several.lengths.tolist() == [40]
    assert one.prompt_tokens.tolist() == several.prompt_tokens.tolist()


def test_the_simulation_is_calibrated_by_the_traces_of_a_run(tmp_path: Path) -> None:
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
    assert found["samples"] == 64 + 16
    assert found["sequence_seconds"] == pytest.approx(0.5e-3, rel=0.1)
    assert found["median_error"] < 0.05


def a_line(generator: int, weights_version: int, *law: float) -> LearntLine:
    return LearntLine(
        generator=f"generator-{generator}", unix_seconds=100.0 * weights_version + generator,
        weights_version=weights_version, version=512 * (weights_version + 1) + generator, num_tokens=512, seconds=1.5,
        saved_seconds=4.0, law=law, acceptance=law[:1], level_share=0.07 if law else None,
        tokens_per_verification=1.6 if law else None,
    )  # fmt: skip


def report(run: Path, *options: str) -> str:
    return rlhfspec("drafter", "report", run, *options)


def test_drafter_report_shows_acceptance_by_law_and_cost(tmp_path: Path) -> None:
    for line in (a_line(0, 0), a_line(1, 0, 0.41, 0.39, 0.38), a_line(0, 1)):
        append_learnt_line(tmp_path, line)
    output = report(tmp_path)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    first = ["0", "513", "3.0", "8.0", ".41 .39 .38", ".41", ".07", "1.60"]
    assert rows == [first, ["1", "1,024", "1.5", "4.0", "-", "-", "-", "-"]]
    assert "learning took 4.5 s of generator time and saved an estimated 12.0 s" in output


def test_drafter_report_shows_the_age_of_the_drafter(tmp_path: Path) -> None:
    append_learnt_line(tmp_path, a_line(0, 3, 1, 1))
    assert "a drafter last learnt 0 steps ago" in report(tmp_path)
    append_learnt_line(tmp_path, replace(a_line(1, 3, 1, 1), num_tokens=0))
    append_learnt_line(tmp_path, replace(a_line(0, 5, 1, 1), num_tokens=0))
    assert "a drafter last learnt 2 steps ago" in report(tmp_path)


def test_drafter_report_of_many_steps_shows_some_and_the_last(tmp_path: Path) -> None:
    for version in range(137):
        append_learnt_line(tmp_path, a_line(0, version, 1, 1))
    rows = [line for line in report(tmp_path).splitlines() if "│" in line]
    assert 15 < len(rows) <= 20
    assert rows[-1].split("│")[1].strip() == "136"


def test_drafter_report_json_prints_the_lines(tmp_path: Path) -> None:
    append_learnt_line(tmp_path, a_line(3, 2, 0.5, 0.25))
    [found] = map(json.loads, report(tmp_path, "--json").splitlines())
    assert found["generator"] == "generator-3"
    assert found["law"] == [0.5, 0.25]


def test_a_line_of_an_older_release_has_empty_fields(tmp_path: Path) -> None:
    append_learnt_line(tmp_path, a_line(0, 0))
    file = tmp_path / LEARNT / "generator-0.jsonl"
    older = json.loads(file.read_text()) | {"num_accepted": [3, 2]}
    for name in ("law", "acceptance", "level_share", "tokens_per_verification"):
        del older[name]
    file.write_text(json.dumps(older) + "\n3\n")
    [found] = map(json.loads, report(tmp_path, "--json").splitlines())
    assert (found["seconds"], found["law"], found["acceptance"], found["level_share"]) == (1.5, [], [], None)


def test_a_torn_learnt_line_is_skipped(tmp_path: Path) -> None:
    append_learnt_line(tmp_path, a_line(0, 0, 1))
    with (tmp_path / LEARNT / "generator-0.jsonl").open("a") as file:
        file.write('{"generator": "generator-0", "unix')
    assert list(learnt_lines(tmp_path)) == [a_line(0, 0, 1)]
    append_learnt_line(tmp_path, a_line(0, 1, 1))
    assert len(list(learnt_lines(tmp_path))) == 2, "and what comes behind it is read"


def test_drafter_commands_say_when_no_drafter_learnt(tmp_path: Path) -> None:
    for run in (tmp_path, tmp_path / "none"):
        for words in (["report", str(run)], ["export", str(run), "--out", str(tmp_path / "out")]):
            result = command(["drafter", *words], 2)
            assert "no drafter learnt in this run" in result.stderr
            assert len(result.stderr.splitlines()) == 1


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    with SpanFiles(tmp_path) as files:
        for span in life().spans:
            files.keep(span)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("sums/3/7/1", "--slowest", "2"), "SAMPLE: cannot be combined with --slowest"),
        (("sums/3/7/1", "--step", "2"), "--step: needs --slowest"),
        (("sums/3/7/9",), "SAMPLE: no trace of it; the nearest: sums/3/7/1"),
        (("--slowest", "2", "--step", "9"), "--step: there are no traces of this step"),
    ],
)
def test_a_wrong_argument_of_trace_is_refused_in_one_line(traced: Path, arguments: tuple[str, ...], said: str) -> None:
    refused = rlhfspec("trace", traced, *arguments, code=2)
    assert refused.startswith(said)
    assert len(refused.splitlines()) == 1


def test_without_a_sample_the_slowest_are_listed(traced: Path) -> None:
    listed = rlhfspec("trace", traced)
    assert listed == rlhfspec("trace", traced, "--slowest", "10")
    assert "sums/3/7/1" in listed


def test_top_says_how_far_a_run_of_one_process_is(tmp_path: Path) -> None:
    a_run(tmp_path, 3, steps=9)
    said = command(["top", str(tmp_path)]).output
    assert "no run with --processes is active in this folder; its run (running, 3 of 9 steps) is shown by" in said
    assert f"rlhfspec dashboard {tmp_path}" in said


def test_the_name_of_the_last_signal_is_reported() -> None:
    for number, name in ((signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")):
        acted = threading.Event()
        with on_signals(acted.set):
            os.kill(os.getpid(), number)
            assert acted.wait(60)
        assert name_of_last() == name


def life() -> Life:
    def span(name: str, stage: str, began: float, ended: float, sent: float | None, **attributes: object) -> Span:
        return Span(
            run="3f2a", sample="sums/3/7/1", name=name, stage=stage, worker=0, step=3, began=100 + began,
            ended=100 + ended, sent=None if sent is None else 100 + sent, attributes=attributes,  # type: ignore[arg-type]
        )  # fmt: skip

    generation = {
        "tokens": 40, "engine_steps": 25, "strategies": "plain x 20, suffix x 5", "accepted": 15, "drafted": 30,
        "weights_versions": "2",
    }  # fmt: skip
    return lives([
        span("prompt", "prompts", 0.0, 0.1, None),
        span("generation", "generator", 1.0, 4.0, 0.0, **generation),
        span("reward", "reward", 4.5, 5.0, 4.0, reward=0.5),
        span("critic", "critic", 4.0, 6.0, 4.0, error="timed\nout"),
        span("training", "trainer", 4.0, 10.0, 4.0, scored=106.0, complete=108.0, dropped=3),
    ])[0]  # fmt: skip


def test_a_waterfall_shows_waiting_and_work_of_each_stage() -> None:
    row = {line.split()[0]: line for line in printed(waterfall(life(), width=20), 240) if line.strip()}
    assert "··██████ " in row["generation"]
    assert "1.00 s until generator 0 took it; 40 tokens in 25 steps: plain x 20, suffix x 5; 15 of" in row["generation"]
    assert "15 of 30 drafted tokens accepted; weights 2" in row["generation"]
    assert "        ·█ " in row["reward"]
    assert "500 ms until reward 0 took it; reward 0.500" in row["reward"]
    assert "failed: timed ↵ out" in row["critic"]
    assert "        ░░░░░░░░████" in row["training"]
    waits = "2.00 s for its scores, the last from critic 0; 2.00 s for the rest of the step; step 3"
    assert f"{waits}; 3 samples of it were left out" in row["training"]


def test_a_narrow_terminal_loses_nothing() -> None:
    for width in (80, 100, 200):
        text = "".join(printed(waterfall(life(), width=12), width))
        assert "…" not in text
        for word in ("generation", "generator 0", "░", "accepted"):
            assert word in text


def test_the_slowest_table_shows_where_time_went() -> None:
    [row] = [line for line in printed(slowest_table([life()])) if "sums/3/7/1" in line]
    assert row.split("   ")[0].strip() == "sums/3/7/1"
    for part in ("6.00 s", "1.50 s", "3.00 s", "critic 2.00 s, reward 500 ms", "40", "generator 0"):
        assert part in row


def test_bars_have_at_least_one_cell_and_stay_within_the_axis() -> None:
    assert bar([("█", 0.0, 0.0)], began=0.0, ended=10.0, width=4) == "█"
    assert bar([("█", 10.0, 10.0)], began=0.0, ended=10.0, width=4) == "   █"
    assert bar([("·", -5.0, 5.0), ("█", 5.0, 50.0)], began=0.0, ended=10.0, width=4) == "··██"
    assert bar([("█", 1.0, 1.0)], began=1.0, ended=1.0, width=4) == "█"


def test_a_run_may_begin_in_a_folder_that_holds_traces(traced: Path) -> None:
    with RunFolder(traced) as folder:
        folder.begin(example_job(), resume=False)


def commands(group: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Return all commands of a group and of the groups in it, with their names."""
    for name, found in group.commands.items():
        yield (*names, name), found
        yield from commands(found, *names, name) if hasattr(found, "commands") else ()


def test_the_hint_of_every_default_is_shown_by_help() -> None:
    hints = 0
    for names, shown_command in commands(get_command(app)):
        shown = CliRunner().invoke(app, [*names, "--help"], env={"COLUMNS": "400"}).output
        for parameter in shown_command.params:
            for hint in re.findall(r"\[default: [^\]]*\]", getattr(parameter, "help", None) or ""):
                assert hint in shown, f"{names}: {hint}"
                hints += 1
    assert hints > 10
    steps = CliRunner().invoke(app, ["simulate", "--help"], env={"COLUMNS": "400"}).output
    assert "[default: all]" in steps

"""`rlhfspec trace` on runs as they are: every sample is there, what it shows is true, and a mistake is one line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from runs import invoke, train
from typer.testing import CliRunner, Result

from rlhfspec.cli.main import app
from rlhfspec.telemetry.run_folder import RunFolder, example_job
from rlhfspec.telemetry.waterfall import bar, slowest_table, waterfall
from rlhfspec.tracing.folder import SpanFiles, read_spans
from rlhfspec.tracing.read import Life, lives
from rlhfspec.tracing.spans import Span

NAMES = {"prompt", "generation", "reward", "reference", "training"}


def trace(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["trace", *arguments])


def test_every_sample_of_a_run_has_its_whole_life_and_traces_change_no_curve(job_file: Path) -> None:
    evaluated = ("evaluation.everySteps=2", "evaluation.numPrompts=2")
    with_traces = train(job_file, "run", *evaluated, "roles.generator.workers=2")
    run = job_file.parent / "run"
    folder = RunFolder(run)
    for life in lives(read_spans(run)):
        assert all(span.ended >= span.began >= 0 for span in life.spans)
        if "/evaluation-" in life.sample:
            assert {span.name for span in life.spans} == {"prompt", "generation", "reward", "evaluation"}
        else:
            assert {span.name for span in life.spans} == NAMES
        parents = {span.id for span in life.spans} | {""}
        assert all(span.parent in parents for span in life.spans)
    ids = {line["id"] for line in [*folder.samples(), *folder.evaluation_samples()]}
    assert {life.sample for life in lives(read_spans(run))} == ids
    told = json.loads(trace(str(run), "letters/2/1/0", "--json").output)
    assert {span["name"] for span in told[0]["spans"]} == NAMES
    assert len({span["trace"] for span in told[0]["spans"]}) == 1
    assert "letters/3/" in trace(str(run), "--slowest", "2").output
    assert train(job_file, "without", *evaluated, "observability.traces=false") == with_traces
    assert not (job_file.parent / "without" / "traces").exists()
    refused = trace(str(job_file.parent / "without"), "letters/2/1/0")
    assert refused.exit_code == 2
    assert refused.output.startswith("RUN: it holds no traces: they are written while a job runs, with observability.")
    assert len(refused.output.splitlines()) == 1


def test_an_endpoint_is_a_url_and_needs_its_package(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = invoke(job_file, "out", "observability.otlpEndpoint=localhost:4317")
    assert (refused.exit_code, "spec.observability.otlpEndpoint" in refused.output) == (2, True)
    monkeypatch.setattr("rlhfspec.telemetry.trackers.find_spec", lambda name: None)
    refused = invoke(job_file, "out", "observability.otlpEndpoint=http://localhost:4317")
    assert refused.exit_code == 2
    assert "pip install 'rlhfspec[processes]'" in refused.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "SAMPLE: give a sample's id, or --slowest N"),
        (("sums/3/7/1", "--slowest", "2"), "SAMPLE: give a sample's id, or --slowest N"),
        (("sums/3/7/1", "--step", "2"), "--step: goes with --slowest"),
        (("sums/3/7/9",), "SAMPLE: no trace of it; the nearest: sums/3/7/1"),
        (("--slowest", "2", "--step", "9"), "--step: there are no traces of this step"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    with SpanFiles(tmp_path) as files:
        for span in life().spans:
            files.keep(span)
    refused = trace(str(tmp_path), *arguments)
    assert refused.exit_code == 2
    assert refused.output.startswith(said)
    assert len(refused.output.splitlines()) == 1


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


def printed(table: object, width: int = 160) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_waterfall_shows_what_waited_for_what() -> None:
    rows = {line.split()[0]: line for line in printed(waterfall(life(), width=20), 240) if line.strip()}
    assert "··██████ " in rows["generation"]
    assert (
        "1.00 s until generator 0 took it; 40 tokens in 25 steps: plain x 20, suffix x 5; 15 of" in rows["generation"]
    )
    assert "15 of 30 drafted tokens accepted; weights 2" in rows["generation"]
    assert "        ·█ " in rows["reward"]
    assert "500 ms until reward 0 took it; reward 0.500" in rows["reward"]
    assert "failed: timed ↵ out" in rows["critic"]
    assert "        ░░░░░░░░████" in rows["training"]
    waits = "2.00 s for its scores, the last from critic 0; 2.00 s for the rest of the step; step 3"
    assert f"{waits}; 3 samples of it were left out" in rows["training"]


def test_a_narrow_terminal_loses_nothing() -> None:
    for width in (80, 100, 200):
        text = "".join(printed(waterfall(life(), width=12), width))
        assert "…" not in text
        for word in ("generation", "generator 0", "░", "accepted"):
            assert word in text


def test_the_slowest_say_where_their_time_went() -> None:
    [row] = [line for line in printed(slowest_table([life()])) if "sums/3/7/1" in line]
    assert row.split("   ")[0].strip() == "sums/3/7/1"
    for part in ("6.00 s", "1.50 s", "3.00 s", "critic 2.00 s, reward 500 ms", "40", "generator 0"):
        assert part in row


def test_bars_are_seen_however_short_and_stay_within_the_axis() -> None:
    assert bar([("█", 0.0, 0.0)], began=0.0, ended=10.0, width=4) == "█"
    assert bar([("█", 10.0, 10.0)], began=0.0, ended=10.0, width=4) == "   █"
    assert bar([("·", -5.0, 5.0), ("█", 5.0, 50.0)], began=0.0, ended=10.0, width=4) == "··██"
    assert bar([("█", 1.0, 1.0)], began=1.0, ended=1.0, width=4) == "█"


def test_a_folder_with_traces_is_a_runs_own(tmp_path: Path) -> None:
    with SpanFiles(tmp_path) as files:
        files.keep(life().spans[0])
    with RunFolder(tmp_path) as folder:
        folder.begin(example_job(), resume=False)

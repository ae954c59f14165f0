"""`rlhfspec trace` shows every sample truly, and errors take one line."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from rlhfspec.cli.main import app
from rlhfspec.runs.folder.run_folder import RunFolder, example_job
from rlhfspec.runs.view.waterfall import bar, slowest_table, waterfall
from rlhfspec.telemetry.folder import SpanFiles
from rlhfspec.telemetry.read import Life, lives
from rlhfspec.telemetry.spans import Span


def trace(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["trace", *arguments])


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

"""`rlhfspec drafter report` on folders with and without a learnt drafter."""

import json
from dataclasses import replace
from pathlib import Path

from typer.testing import CliRunner, Result

from rlhfspec.cli.main import app
from rlhfspec.runs.folder.learnt import LEARNT, LearntLine, append_learnt_line, learnt_lines


def a_line(generator: int, weights_version: int, *num_accepted: int) -> LearntLine:
    return LearntLine(
        generator=f"generator-{generator}", unix_seconds=100.0 * weights_version + generator,
        weights_version=weights_version, version=512 * (weights_version + 1), num_tokens=512, seconds=1.5,
        saved_seconds=4.0, num_accepted=num_accepted,
    )  # fmt: skip


def report(run: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["drafter", "report", str(run), *options])


def test_it_shows_acceptance_by_step_and_depth_and_what_it_cost(tmp_path: Path) -> None:
    for line in (a_line(0, 0, 2, 2), a_line(1, 0, 0, 0, 4), a_line(0, 1, 0, 0, 0, 0, 8)):
        append_learnt_line(tmp_path, line)
    result = report(tmp_path)
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines() if "│" in line]
    assert rows == [
        ["0", "512", "3.0", "8.0", "2.25", "75%", "50%", "0%", "0%", "0%", "0%"],
        ["1", "1,024", "1.5", "4.0", "5.00", "100%", "100%", "100%", "100%", "0%", "0%"],
    ]
    assert "learning took 4.5 s of generators and saved an estimated 12.0 s" in result.output


def test_it_says_how_old_the_drafter_is(tmp_path: Path) -> None:
    append_learnt_line(tmp_path, a_line(0, 3, 1, 1))
    assert "learnt last 0 steps ago" in report(tmp_path).output
    append_learnt_line(tmp_path, replace(a_line(1, 3, 1, 1), num_tokens=0))
    append_learnt_line(tmp_path, replace(a_line(0, 5, 1, 1), num_tokens=0))
    assert "learnt last 2 steps ago" in report(tmp_path).output


def test_of_many_steps_it_shows_some_and_the_last(tmp_path: Path) -> None:
    for version in range(137):
        append_learnt_line(tmp_path, a_line(0, version, 1, 1))
    rows = [line for line in report(tmp_path).output.splitlines() if "│" in line]
    assert 15 < len(rows) <= 20
    assert rows[-1].split("│")[1].strip() == "136"


def test_as_json_it_gives_the_lines(tmp_path: Path) -> None:
    line = a_line(3, 2, 5, 1)
    append_learnt_line(tmp_path, line)
    [found] = map(json.loads, report(tmp_path, "--json").output.splitlines())
    assert found["generator"] == "generator-3"
    assert found["num_accepted"] == [5, 1]


def test_a_line_that_a_generator_was_killed_in_is_left_out(tmp_path: Path) -> None:
    append_learnt_line(tmp_path, a_line(0, 0, 1))
    with (tmp_path / LEARNT / "generator-0.jsonl").open("a") as file:
        file.write('{"generator": "generator-0", "unix')
    assert list(learnt_lines(tmp_path)) == [a_line(0, 0, 1)]
    append_learnt_line(tmp_path, a_line(0, 1, 1))
    assert len(list(learnt_lines(tmp_path))) == 2, "and what comes behind it is read"


def test_where_no_drafter_learnt_it_says_so_in_a_line(tmp_path: Path) -> None:
    for run in (tmp_path, tmp_path / "none"):
        for command in (["report", str(run)], ["export", str(run), "--out", str(tmp_path / "out")]):
            result = CliRunner().invoke(app, ["drafter", *command])
            assert result.exit_code == 2
            assert "no drafter learnt there" in result.stderr
            assert len(result.stderr.splitlines()) == 1

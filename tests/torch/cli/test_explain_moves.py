"""`rlhfspec explain-moves`, the view and the metrics show plans and their results."""

import json
from pathlib import Path
from typing import Any

from loads import a_load, knowing, moved, skewed
from typer.testing import CliRunner, Result
from views import a_full_view, picture, terminal

from rlhfspec.cli.main import app
from rlhfspec.rebalancer.knowledge import Advice
from rlhfspec.rebalancer.service import plan_of
from rlhfspec.runs.folder.moves import MovesFile
from rlhfspec.telemetry.base import WorkerPlace
from rlhfspec.telemetry.meters import Meters
from rlhfspec.telemetry.prometheus import text_of


def explain(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["explain-moves", *arguments])


def an_advice(**changed: Any) -> Advice:
    knowledge = knowing()
    skewed(knowledge, 5.0, **changed)
    advice = knowledge.advise(5.0)
    assert advice is not None
    return advice


def a_run(folder: Path) -> None:
    file = MovesFile(folder, now=lambda: 0.0)
    advice = an_advice()
    file.plan(plan_of(advice, None, id="sums/plan/a/1", job="sums"))
    file.moved([moved(advice.moves[0], num_bytes=4_700_000, num_rounds=2, pause_seconds=0.0123)])
    file.moved([moved(advice.moves[1], "kept", reason="no free row")])
    file.plan(plan_of(an_advice(num_free_rows=0), None, id="sums/plan/a/2", job="sums"))


def test_it_says_what_moved_why_and_what_came_of_it(tmp_path: Path) -> None:
    a_run(tmp_path)
    told = explain(str(tmp_path))
    assert told.exit_code == 0
    lines = [line.partition("  ")[2] for line in told.output.splitlines()]
    assert lines[0].startswith("8 samples at 2 generators, the last to end in 2.")
    assert "generator 0 -> 1: generator 0 ends in 2." in lines[1]
    assert "went with its KV, 4.7 MB in 2 rounds, a pause of 12.3 ms" in told.output
    assert "generator 0 -> 1: stayed: no free row" in told.output
    assert "; nothing moves" in told.output
    assert told.output.splitlines()[-1] == "4 moves were advised"


def test_as_json_it_is_the_lines_of_the_file(tmp_path: Path) -> None:
    a_run(tmp_path)
    told = explain(str(tmp_path), "--json").output.splitlines()
    assert [json.loads(line) for line in told] == [
        json.loads(line) for line in (tmp_path / "moves.jsonl").read_text().splitlines()
    ]


def test_a_folder_without_moves_is_one_line(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        refused = explain(str(folder))
        assert refused.exit_code == 2
        assert refused.output.startswith("RUN: ")
        assert len(refused.output.splitlines()) == 1


def test_the_view_has_a_row_of_moves() -> None:
    console = terminal()
    view = a_full_view(console)
    advice = an_advice()
    view.progress.plan(plan_of(advice, None, id="plan", job="sums"))
    view.progress.moved(moved(advice.moves[0]))
    view.progress.moved(moved(advice.moves[1], "kept"))
    [row] = [line for line in picture(view, console) if "moves " in line]
    assert "1 not" in row
    assert "generator 0 ends in" in row


def test_moves_are_counted() -> None:
    meters = Meters()
    advice = an_advice()
    place = WorkerPlace("generator", 0)
    ended = [
        moved(advice.moves[0], num_bytes=1000, pause_seconds=0.004),
        moved(advice.moves[1], "tokens", num_recomputed=70, pause_seconds=0.2),
        moved(advice.moves[2], "kept", reason="no room", num_bytes=9, pause_seconds=9.0),
    ]
    for record in ended:
        meters.published(place, record, 0.0, True)
    text = text_of(meters.metrics())
    for how in ("kv", "tokens", "kept"):
        assert f'rlhfspec_moves_total{{how="{how}",stage="generator",worker="0"}} 1.0' in text
    assert 'rlhfspec_move_bytes_total{stage="generator",worker="0"} 1000.0' in text
    assert 'rlhfspec_move_recomputed_tokens_total{stage="generator",worker="0"} 70.0' in text
    assert 'rlhfspec_move_pause_seconds_bucket{how="kv",le="0.005",stage="generator",worker="0"} 1.0' in text
    assert 'how="kept",le' not in text


def test_loads_of_rebalancing_are_loads(tmp_path: Path) -> None:
    from rlhfspec.messages.wire.codec import decode, encode

    load = a_load(1, range(3), is_leaving=True)
    assert decode(encode(load)) == load

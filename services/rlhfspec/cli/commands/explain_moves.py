from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rlhfspec.cli.problems import exit_on_problems
from rlhfspec.cli.progress import wide_console
from rlhfspec.errors import InvalidRequest
from rlhfspec.runs.view.text import one_line
from rlhfspec.runs.view.view import print_line

_HOW = {
    "kv": "moved with its KV cache",
    "tokens": "moved without its KV cache, which is recomputed there",
    "kept": "stayed",
    "lost": "was lost there and will be delivered again",
}

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per line, as in moves.jsonl.")]


def explain_moves(run: Run, as_json: AsJson = False) -> None:
    """Show which samples moved to another generator, why or why not, and the outcome of each move."""
    with exit_on_problems():
        lines = _lines(run)
    console = wide_console()
    num_moves = 0
    for line in lines:
        num_moves += len(line.get("moves", ()))
        if as_json:
            typer.echo(json.dumps(line))
        else:
            _print(console, line)
    if not as_json:
        print_line(console, f"{num_moves} moves were advised")


def _lines(run: Path) -> Iterator[dict[str, Any]]:
    from rlhfspec.runs.folder.moves import MOVES_FILE, read_moves

    if not run.is_dir():
        raise InvalidRequest("RUN", str(run), "is not a run folder")
    if not (run / MOVES_FILE).exists():
        problem = f"has no {MOVES_FILE}: nothing was planned (one generator, or rebalance.mode: off)"
        raise InvalidRequest("RUN", str(run), problem)
    return (line for line, _ in read_moves(run))


def _print(console: Console, line: dict[str, Any]) -> None:
    when = datetime.fromtimestamp(line["at"]).strftime("%H:%M:%S")
    for text in _words_of_plan(line) if line["kind"] == "plan" else [_words_of_end(line)]:
        print_line(console, f"{when}  {one_line(text)}")


def _words_of_plan(line: dict[str, Any]) -> Iterator[str]:
    number = len(line["moves"])
    after = f", or in {line['latest_end_after']:.2f} s with {number} moves" if number else "; no moves"
    yield (
        f"{line['num_samples']} samples on {line['num_generators']} generators: the last ends "
        f"in {line['latest_end']:.2f} s{after}"
    )
    for move in line["moves"]:
        yield f"  {move['sample']}: generator {move['source']} -> {move['destination']}: {move['reason']}"
    for reason in line["why_not"]:
        yield f"  stays: {reason}"
    for worker, told in line["dry"].items():
        yield f"  generator {worker} has nothing to do: {_DRY[told]}"


_DRY = {
    "consolidate": "fewer engines on its host are faster",
    "learn": "its drafter learns",
    "score": "free for other work",
    "wait": "the others are about to finish",
}


def _words_of_end(line: dict[str, Any]) -> str:
    where = f"{line['sample_id']}: generator {line['source']} -> {line['destination']}"
    if line["how"] not in ("kv", "tokens"):
        return f"{where}: {_HOW[line['how']]}: {line['reason']}"
    recomputed = f", {line['num_recomputed']} tokens recomputed" if line["num_recomputed"] else ""
    return (
        f"{where}: {_HOW[line['how']]}, {line['num_bytes'] / 1e6:.1f} MB in {line['num_rounds']} rounds, "
        f"a pause of {line['pause_seconds'] * 1e3:.1f} ms{recomputed}"
    )

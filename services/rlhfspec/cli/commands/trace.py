from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhfspec.cli.problems import exit_on_problems
from rlhfspec.cli.progress import wide_console
from rlhfspec.errors import InvalidRequest

if TYPE_CHECKING:
    from rlhfspec.telemetry.read import Life

_LISTED = 10  # slowest samples, where neither a sample nor a number is given
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.", show_default=False)]
Sample = Annotated[
    str | None,
    typer.Argument(
        metavar="[SAMPLE]", help="Id of a sample in samples.jsonl, such as sums/3/7/1 (or 3/7/1).", show_default=False
    ),
]
Slowest = Annotated[
    int | None, typer.Option("--slowest", metavar="N", min=1, help="List the N slowest samples of a step instead.")
]
Step = Annotated[
    int | None,
    typer.Option("--step", metavar="STEP", min=1, help="Step for --slowest.  [default: the last trained step]"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the spans as JSON instead of a picture.")]


def trace(run: Run, sample: Sample = None, slowest: Slowest = None, step: Step = None, as_json: AsJson = False) -> None:
    """Show where a sample's time went: prompt, generation, scores, training, and what waited for what."""
    if sample is None and slowest is None:
        slowest = _LISTED
    with exit_on_problems():
        lives = _found(run, sample, slowest, step)
    if as_json:
        typer.echo(json.dumps([_content(life) for life in lives], indent=2))
        return
    from rlhfspec.runs.view.waterfall import bar_width, slowest_table, waterfall

    console = wide_console()
    picture = waterfall(lives[0], width=bar_width(console.width)) if slowest is None else slowest_table(lives)
    console.print(picture)


def _found(run: Path, sample: str | None, slowest: int | None, step: int | None) -> list[Life]:
    from rlhfspec.telemetry import read

    if sample is not None and slowest is not None:
        raise InvalidRequest("SAMPLE", sample, "cannot be combined with --slowest")
    if step is not None and slowest is None:
        raise InvalidRequest("--step", step, "needs --slowest")
    return [read.life_of(run, sample)] if sample is not None else read.slowest(run, slowest or 1, step=step)


def _content(life: Life) -> dict[str, Any]:
    spans = [asdict(span) | {"trace": span.trace, "id": span.id} for span in life.spans]
    return {"sample": life.sample, "began": life.began, "ended": life.ended, "spans": spans}

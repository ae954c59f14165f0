"""`rlhfspec compare`: several runs beside each other."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from rlhfspec.cli.problems import exit_on_problems
from rlhfspec.cli.progress import wide_console
from rlhfspec.errors import InvalidRequest

if TYPE_CHECKING:
    from rlhfspec.telemetry.metrics import StepMetrics

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.", show_default=False)]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Also draw the curves into this PNG.")]


def compare(runs: Runs, plot: Plot = None) -> None:
    """Compare runs: reward from first to last, KL, length, speed."""
    from rlhfspec.telemetry import plots

    steps: dict[str, list[StepMetrics]] = {}
    with exit_on_problems():
        for path in runs:
            steps[_name(path, steps)] = _steps(path)
    wide_console().print(_table(steps))
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        plots.compare(steps, plot)
        typer.echo(f"picture: {plot.absolute()}")


def _name(path: Path, taken: Container[str]) -> str:
    """The folder's, or its path where two folders share one."""
    return path.name if path.name not in taken else str(path)


def _steps(path: Path) -> list[StepMetrics]:
    from rlhfspec.telemetry.run_folder import RunFolder

    folder = RunFolder(path)
    if not folder.steps_file.exists():
        raise InvalidRequest("RUN", str(path), "no run with a finished step is there: steps.jsonl is missing")
    return folder.steps()


def _table(runs: dict[str, list[StepMetrics]]) -> Table:
    from rlhfspec.telemetry.plots import ends
    from rlhfspec.telemetry.text import number

    table = Table()
    table.add_column("run")
    for title in ("steps", "reward, first", "last", "change", "KL, last", "length, last", "tokens/s", "seconds a step"):
        table.add_column(title, justify="right")
    for name, steps in runs.items():
        first, last = ends(steps)
        table.add_row(
            name,
            str(len(steps)),
            number(first),
            number(last),
            f"{last - first:+.3f}",
            number(steps[-1].kl),
            number(steps[-1].response_length.mean),
            number(sum(s.tokens_per_second for s in steps) / len(steps)),
            number(sum(s.seconds.step for s in steps) / len(steps)),
        )
    return table

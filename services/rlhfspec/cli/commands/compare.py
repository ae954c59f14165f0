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
    from rlhfspec.messages.records.evaluations import Evaluation
    from rlhfspec.messages.records.metrics import StepMetrics

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.", show_default=False)]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Also plot the curves to this PNG.")]


def compare(runs: Runs, plot: Plot = None) -> None:
    """Compare runs: first and last reward, held-out reward where all runs have it, KL, response length, speed."""
    from rlhfspec.runs.folder.run_folder import RunFolder
    from rlhfspec.runs.view import plots
    from rlhfspec.runs.view.learning_signs import warning_of

    steps: dict[str, list[StepMetrics]] = {}
    evaluations: dict[str, list[Evaluation]] = {}
    with exit_on_problems():
        for path in runs:
            name = _name(path, steps)
            steps[name], evaluations[name] = _steps(path), RunFolder(path).evaluations()
    shown = evaluations if all(evaluations.values()) else {}
    wide_console().print(_table(steps, shown))
    for name in steps:
        if warning := warning_of(steps[name], evaluations[name]):
            typer.echo(f"{name}: {warning}")
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        plots.compare(steps, plot, evaluations=shown)
        typer.echo(f"picture: {plot.absolute()}")


def _name(path: Path, taken: Container[str]) -> str:
    return path.name if path.name not in taken else str(path)


def _steps(path: Path) -> list[StepMetrics]:
    from rlhfspec.runs.folder.run_folder import RunFolder

    folder = RunFolder(path)
    if not folder.steps_file.exists():
        raise InvalidRequest("RUN", str(path), "has no finished step: steps.jsonl is missing")
    return folder.steps()


def _table(runs: dict[str, list[StepMetrics]], evaluations: dict[str, list[Evaluation]]) -> Table:
    from rlhfspec.messages.records.evaluations import best
    from rlhfspec.runs.view.plots import ends
    from rlhfspec.runs.view.text import number

    table = Table()
    table.add_column("run")
    held_out = ("held-out, best", "after step") if evaluations else ()
    for title in ("steps", "reward, first", "last", "change", *held_out, "KL (k3), last", "length, last", "tokens/s",
                  "seconds a step"):  # fmt: skip
        table.add_column(title, justify="right")
    for name, steps in runs.items():
        first, last = ends(steps)
        top = [best(evaluations[name])] if evaluations else []
        speeds = [metrics.tokens_per_second for metrics in steps if metrics.tokens_per_second is not None]
        table.add_row(
            name,
            str(len(steps)),
            number(first),
            number(last),
            f"{last - first:+.3f}",
            *(text for run in top for text in (number(run.reward.mean), str(run.step))),
            number(steps[-1].kl_k3),
            number(steps[-1].response_length.mean),
            number(sum(speeds) / len(speeds) if speeds else None),
            number(sum(s.seconds.step for s in steps) / len(steps)),
        )
    return table

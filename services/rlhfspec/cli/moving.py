"""`rlhfspec bench rebalance` and `rlhfspec bench migrate`: what moves cost, and what they bring."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhfspec.cli.bench_models import Draft, Model, checked, models
from rlhfspec.cli.progress import StatusLine, wide_console

if TYPE_CHECKING:
    from rlhfspec.bench.moving.rebalance import Rebalancer

# Says whether it works and roughly what comes, in three minutes.
QUICK_REBALANCE: dict[str, Any] = {"decoding": ("adaptive",), "seeds": 1, "repeats": 2, "scale": 0.5}


def rebalance(
    model: Model = None,
    draft: Draft = None,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, short responses; done within minutes.")] = False,
    workloads: Annotated[str | None, typer.Option(help="Among skew, groups, independent; all by default.")] = None,
    decoding: Annotated[str | None, typer.Option(help="Among adaptive, plain; both by default.")] = None,
    arms: Annotated[str | None, typer.Option(help="Among dealt, pulled, ours, clairvoyant; all by default.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Stages of each workload.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Repetitions of every stage, arms interleaved.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw it into this PNG.")] = None,
) -> None:
    """Time a stage on two generators of one core each: dealt, pulled, moved while it runs, and dealt knowing all."""
    from rlhfspec.bench.moving.rebalance import DifferentTokens, RebalanceBenchmark, RebalanceSettings
    from rlhfspec.bench.moving.rebalance_plot import plot
    from rlhfspec.bench.moving.rebalance_report import render

    given = {
        "workloads": _names(workloads),
        "decoding": _names(decoding),
        "arms": _names(arms),
        "seeds": seeds,
        "repeats": repeats,
    }
    chosen = (QUICK_REBALANCE if quick else {}) | {name: value for name, value in given.items() if value is not None}
    with StatusLine() as status:
        target_path, draft_path = models(model, draft, status)
        settings = checked(RebalanceSettings, model=target_path, draft=draft_path, dtype=dtype, **chosen)
        benchmark = RebalanceBenchmark(settings, generator_command, rebalancer_of_a_run, report=status)
        try:
            results = checked(benchmark.run)
        except DifferentTokens as difference:
            typer.echo(str(difference), err=True)
            raise typer.Exit(1) from difference
    wide_console().print(render(results))
    if json_file is not None:
        json_file.write_text(results.to_json())
    if plot_file is not None:
        plot(results, plot_file)
        typer.echo(f"plot: {plot_file}")


def generator_command(number: int, core: int) -> list[str]:
    return [sys.executable, "-m", "rlhfspec.cli.bench_generator", str(number), str(core)]


def rebalancer_of_a_run(now: float, earlier: Sequence[int]) -> Rebalancer:
    from rlhfspec.cli.bench_rebalancer import RunsRebalancer

    return RunsRebalancer(now, earlier)


def _names(text: str | None) -> tuple[str, ...] | None:
    return tuple(text.split(",")) if text else None

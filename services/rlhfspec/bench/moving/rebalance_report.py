"""The tables of `rlhfspec bench rebalance`: curves, stage times by arm, ratios and bars."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfspec.bench.moving.arms import ARMS
from rlhfspec.bench.moving.prediction import IDEAL
from rlhfspec.bench.moving.rebalance_results import RebalanceResults, Row, bars
from rlhfspec.bench.ratios import Ratio
from rlhfspec.bench.results import Bar


def render(results: RebalanceResults) -> Group:
    rows = results.rows
    parts: list[RenderableType] = [_heading(results), _curves(results), _seconds(rows), _ratios(rows)]
    parts += [bar_line(bar) for bar in bars(rows)]
    return Group(*parts)


def bar_line(bar: Bar) -> Text:
    mark = "met" if bar.holds else "not met"
    return Text(f"{bar.scenario}: {bar.name} {bar.wanted}: {bar.found} ({mark})", style="green" if bar.holds else "red")


def _heading(results: RebalanceResults) -> Text:
    settings = results.settings
    return Text(
        f"{results.machine.cpu}, two generators of one thread and core, {settings['model']} with {settings['draft']}, "
        f"{settings['dtype']}, arithmetic {results.machine.arithmetic}\n"
        f"64 sequences of synthetic lengths (lognormal), {settings['seeds']} seeds, {settings['repeats']} interleaved "
        "repetitions each; the same tokens and log-probs in every arm"
    )


def _curves(results: RebalanceResults) -> Table:
    sizes = next(iter(results.curves.values())).sizes
    table = Table(title="ms for a token of each of B sequences", title_style="bold")
    for name in ("decoding", "neighbour", *map(str, sizes), "t0", "c", "a prompt token"):
        table.add_column(name, justify="left" if name in ("decoding", "neighbour") else "right")
    for decoding, curve in results.curves.items():
        law = (*curve.law, curve.prefill_seconds)
        table.add_row(decoding, "runs", *(f"{1000 * value:.2f}" for value in (*curve.busy, *law)))
        table.add_row("", "sleeps", *(f"{1000 * value:.2f}" for value in curve.alone))
    return table


def _seconds(rows: Iterable[Row]) -> Table:
    table = Table(title="seconds of a stage (simulated by the curve / found, less 1)", title_style="bold")
    for name in ("decoding", "workload", "halves", *ARMS, IDEAL, "moves a sequence"):
        table.add_column(name, justify="left" if name in ("decoding", "workload") else "right")
    for row in rows:
        cells = [_cell(row, arm) for arm in (*ARMS, IDEAL)]
        halves = f"{row.imbalance[0]:.2f}-{row.imbalance[1]:.2f}"
        table.add_row(row.decoding, row.workload, halves, *cells, f"{row.moves_per_sequence:.2f}")
    return table


def _cell(row: Row, arm: str) -> str:
    if arm not in row.seconds:
        return "-"
    error = f" ({row.prediction_errors[arm]:+.0%})" if arm in row.prediction_errors else ""
    return f"{row.seconds[arm]:.2f}{error}"


def _ratios(rows: Iterable[Row]) -> Table:
    table = Table(title="ratios, geometric means with 95 % intervals", title_style="bold")
    names = ("dealt / ours", "gap closed", "ours / clairvoyant", "ours / better of dealt, pulled")
    for name in ("decoding", "workload", *names):
        table.add_column(name, justify="left" if name in ("decoding", "workload") else "right")
    for row in rows:
        found: tuple[Ratio | None, ...] = (row.dealt_to_ours, row.closed, row.to_clairvoyant, row.harm)
        table.add_row(row.decoding, row.workload, *("-" if ratio is None else str(ratio) for ratio in found))
    return table

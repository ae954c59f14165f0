"""Tables of `rlhfspec bench rebalance`: curves, stage times, ratios and bars."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rlhfspec.bench.moving.rebalancing.arms import ARMS
from rlhfspec.bench.moving.rebalancing.prediction import IDEAL
from rlhfspec.bench.moving.rebalancing.results import RebalanceResults, Row
from rlhfspec.bench.ratios import Ratio
from rlhfspec.bench.tables import ending, table_of


def render(results: RebalanceResults) -> Group:
    rows = results.rows
    return Group(_heading(results), _curves(results), _seconds(rows), _ratios(rows), *ending(results))


def _heading(results: RebalanceResults) -> Text:
    settings = results.settings
    return Text(
        f"{results.cpu}, two generators of one thread and core, {settings['model']} with {settings['draft']}, "
        f"{settings['dtype']}, arithmetic {results.arithmetic}\n"
        f"64 sequences of synthetic lengths (lognormal), {settings['seeds']} seeds, {settings['repeats']} interleaved "
        "repetitions each; the same tokens and log-probs in every arm"
    )


def _curves(results: RebalanceResults) -> Table:
    sizes = next(iter(results.curves.values())).sizes
    columns = ("decoding", "neighbour", *map(str, sizes), "t0", "c", "a prompt token")
    table = table_of("ms for a token of each of B sequences", columns, left=columns[:2])
    for decoding, curve in results.curves.items():
        law = (*curve.law, curve.prefill_seconds)
        table.add_row(decoding, "runs", *(f"{1000 * value:.2f}" for value in (*curve.busy, *law)))
        table.add_row("", "sleeps", *(f"{1000 * value:.2f}" for value in curve.alone))
    return table


def _seconds(rows: Iterable[Row]) -> Table:
    columns = ("decoding", "workload", "halves", *ARMS, IDEAL, "moves a sequence")
    table = table_of("seconds of a stage (simulated by the curve / found, less 1)", columns, left=columns[:2])
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
    names = ("dealt / ours", "gap closed", "ours / clairvoyant", "ours / better of dealt, pulled")
    columns = ("decoding", "workload", *names)
    table = table_of("ratios, geometric means with 95 % intervals", columns, left=columns[:2])
    for row in rows:
        found: tuple[Ratio | None, ...] = (row.dealt_to_ours, row.closed, row.to_clairvoyant, row.harm)
        table.add_row(row.decoding, row.workload, *("-" if ratio is None else str(ratio) for ratio in found))
    return table

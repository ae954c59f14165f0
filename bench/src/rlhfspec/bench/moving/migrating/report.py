"""Tables of `rlhfspec bench migrate`: moves by cell, links alone, and bars."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rlhfspec.bench.moving.migrating.results import Cell, MigrateResults
from rlhfspec.bench.tables import ending, table_of

_LEFT = ("model", "decoding", "link")


def render(results: MigrateResults) -> Group:
    links = [_links(results)] if results.links else []
    return Group(_heading(results), _cells(results), *links, *ending(results))


def _heading(results: MigrateResults) -> Text:
    settings = results.settings
    return Text(
        f"{results.cpu}, two generators of one core each, both decoding 8 others, {settings['model']}, "
        f"{settings['dtype']}\nmedians of {settings['repeats']} moves, links in turn; pause: source lets go -> "
        "destination has it;\ngap: last token here -> first there, re-prefill: the same when its KV is computed again; "
        "CPU: of both ends, beyond decoding\n(in the engines' threads); even at: tokens from which the move is shorter"
    )


def _cells(results: MigrateResults) -> Table:
    columns = (*_LEFT, "tokens", "moves", "MB", "pause", "gap", "step", "whole", "CPU", "CPU/MB", "held, most",
               "re-prefill", "times", "even at")  # fmt: skip
    table = table_of("one move, milliseconds", columns, left=_LEFT)
    for cell in results.cells:
        table.add_row(*_row(cell))
    return table


def _row(cell: Cell) -> list[str]:
    def ms(name: str) -> str:
        return f"{1000 * cell.median(name):.1f}"

    most = max(move.held for move in cell.moves)
    cpu = f"{ms('cpu')} ({ms('engine_cpu')})"
    return [
        cell.model, cell.decoding, cell.link, str(cell.num_tokens), str(len(cell.moves)),
        f"{cell.median('num_bytes') / 1e6:.1f}", ms("pause"), ms("gap"), ms("step"), ms("seconds"), cpu,
        f"{1000 * cell.cpu_per_mb:.2f}", f"{ms('held')}, {1000 * most:.1f}", f"{1000 * cell.prefill_gap:.0f}",
        f"{cell.times_shorter:.1f}", f"{cell.break_even_tokens:.0f}",
    ]  # fmt: skip


def _links(results: MigrateResults) -> Table:
    columns = ("link", "MB", "ms", "GB/s", "CPU ms/MB")
    table = table_of("links without engines, one range from packing to unpacked", columns, left=columns[:1])
    for cost in results.links:
        speed = cost.bytes_per_second / 1e9
        cpu = 1000 * cost.cpu_seconds_per_mb
        table.add_row(
            cost.kind, f"{cost.num_bytes / 1e6:.1f}", f"{1000 * cost.seconds:.2f}", f"{speed:.1f}", f"{cpu:.2f}"
        )
    return table

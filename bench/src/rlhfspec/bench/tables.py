"""Tables shared by all benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from rlhfspec.bench.generating.results import Bar, BenchResults


def table_of(title: str, columns: Iterable[str], *, left: Sequence[str] = ()) -> Table:
    """Return a table with columns aligned right, except those in `left`.

    >>> [(column.header, column.justify) for column in table_of("speed", ("mode", "tokens/s"), left=("mode",)).columns]
    [('mode', 'left'), ('tokens/s', 'right')]
    """
    table = Table(title=title, title_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    return table


def ending(results: BenchResults) -> list[Table | Text]:
    """Return the report's end: the table of bars, and a line for each skipped mode."""
    return [*([_bars(results.bars)] if results.bars else ()),
            *(Text(f"left out: {line}", style="yellow") for line in results.skipped)]  # fmt: skip


def mark(holds: bool) -> Text:
    return Text("✓", style="green") if holds else Text("✗", style="red")


def _bars(bars: tuple[Bar, ...]) -> Table:
    held = sum(bar.holds for bar in bars)
    columns = ("", "threads", "scenario", "bar", "wanted", "found")
    table = table_of(f"bars: {held} of {len(bars)} hold", columns, left=("", "scenario", "bar"))
    for bar in bars:
        table.add_row(mark(bar.holds), str(bar.num_threads), bar.scenario, bar.name, bar.wanted, bar.found)
    return table

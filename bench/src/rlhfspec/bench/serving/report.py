"""Table and plot of `rlhfspec bench serve`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from rlhfspec.bench.serving.results import ServeResults, ServeRow
from rlhfspec.bench.tables import ending, table_of
from rlhfspec.simulator.picture import drawn

_COLORS = {
    "alone": "#30638e", "priority": "#d1495b", "equal": "#8d99ae", "vllm-alone": "#b9c7b0", "vllm-priority": "#edae49",
}  # fmt: skip


def render(results: ServeResults) -> Group:
    return Group(_heading(results), _table(results), *ending(results))


def _heading(results: ServeResults) -> Text:
    said = results.settings
    idle = ", ".join(f"{1000 * seconds:.0f} ms ({system})" for system, seconds in results.idle_ttft.items())
    return Text(
        f"{results.cpu}, {said['num_threads']} thread(s), {said['dtype']}, arithmetic {results.arithmetic}\n"
        f"{said['model']}, draft {said['draft']}: {said['rate']:g} chats a second with answers of up to "
        f"{said['num_tokens']} tokens, {said['rollouts']} rollouts; {said['repeats']} x {said['chats']} chats\n"
        f"goodput: chats with TTFT <= {1000 * said['ttft']:.0f} ms and TPOT <= {1000 * said['tpot']:.0f} ms; "
        f"TTFT of an idle server: {idle}"
    )


def _table(results: ServeResults) -> Table:
    columns = (
        "mode", "TTFT p50 / p95, ms", "TPOT p50 / p95, ms", "worst gap p95, ms", "chat tokens/s", "rollout tokens/s",
        "of rollouts alone", "goodput, chats/s",
    )  # fmt: skip
    table = table_of("chats and rollouts", columns, left=("mode",))
    for row in results.rows:
        table.add_row(row.mode, *_cells(row))
    return table


def _cells(row: ServeRow) -> Iterator[str]:
    for times in (row.ttft, row.tpot):
        yield " / ".join(f"{1000 * each:.0f}" for each in times)
    yield f"{1000 * row.gap[1]:.0f}" if row.gap else ""
    yield f"{row.chat_speed:.0f}"
    yield f"{row.rollout_speed:.0f}"
    yield str(row.kept or "")
    yield f"{row.goodput:.2f}"


def plot(results: ServeResults, path: Path) -> None:
    """Draw the share of chats that were within a time, for each mode with chats."""
    with drawn(path, figsize=(11, 4.4)) as figure:
        axes = figure.subplots(1, 2, sharey=True)
        for axis, name, label in zip(axes, ("ttft", "tpot"), ("time to first token", "time per token"), strict=True):
            for row in (row for row in results.rows if row.ttft):
                times = np.sort([1000 * getattr(answer, name) for turn in row.turns for answer in turn.answers])
                shares = np.arange(1, len(times) + 1) / len(times)
                axis.step(times, shares, where="post", color=_COLORS[row.mode], label=row.mode)
            axis.axvline(1000 * results.settings[name], color="black", linestyle=":", label="target")
            axis.set(xlabel=f"{label}, ms", xscale="log")
            axis.grid(alpha=0.3)
        axes[0].set(ylabel="share of chats")
        axes[1].legend()

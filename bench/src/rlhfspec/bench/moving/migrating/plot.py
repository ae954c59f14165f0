"""Plot of `rlhfspec bench migrate`: gaps, pauses and CPU of moves by length, compared with recomputing the KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhfspec.bench.bars import MORE_THAN_A_STEP
from rlhfspec.bench.moving.migrating.results import Cell, MigrateResults
from rlhfspec.simulator.picture import drawn

_COLORS = {"shm": "#30638e", "tcp": "#d1495b", "nixl": "#edae49", "torch": "#8d99ae"}


def plot(results: MigrateResults, path: Path) -> None:
    """Draw a column per model and decoding: gaps above, pauses and CPU below."""
    kinds = list(dict.fromkeys((cell.model, cell.decoding) for cell in results.cells))
    with drawn(path, figsize=(4.4 * len(kinds) + 1, 9)) as figure:
        axes = figure.subplots(3, len(kinds), squeeze=False)
        for column, kind in zip(axes.T, kinds, strict=True):
            cells = [cell for cell in results.cells if (cell.model, cell.decoding) == kind]
            sizes = sorted({cell.num_tokens for cell in cells})
            links = list(dict.fromkeys(cell.link for cell in cells))
            megabytes = max(cell.median("num_bytes") for cell in cells) / 1e6
            column[0].set_title(f"{kind[0]}, {kind[1]} (up to {megabytes:.1f} MB)", fontsize=10)
            for place, link in enumerate(links):
                mine = [cell for cell in cells if cell.link == link]
                xs = [sizes.index(cell.num_tokens) + (place - (len(links) - 1) / 2) * 0.16 for cell in mine]
                for axis, name in zip(column, ("gap", "pause", "cpu"), strict=True):
                    _dots(axis, xs, mine, name, link)
                _bar_of_pause(column[1], xs, mine)
            for cell in cells:
                x = sizes.index(cell.num_tokens)
                values = [1000 * gap for gap in cell.prefill_gaps]
                column[0].scatter([x] * len(values), values, s=14, marker="x", color="black", linewidths=0.8,
                                  label="KV computed again" if cell is cells[0] else None)  # fmt: skip
            column[0].set_yscale("log")
            for axis in column:
                axis.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
                axis.set_xlim(-0.6, len(sizes) - 0.4)
                axis.grid(alpha=0.3, axis="y")
            for axis in column[1:]:
                axis.set_ylim(0, None)
            column[2].set_xlabel("tokens")
        names = ("gap, ms", "pause, ms (dotted: what is promised)", "CPU of both ends, ms")
        for axis, name in zip(axes[:, 0], names, strict=True):
            axis.set_ylabel(name)
        axes[0][0].legend(fontsize=8)
        figure.suptitle(f"{results.cpu}: two generators, one core each, both busy", fontsize=10)


def _dots(axis: Any, xs: list[float], cells: list[Cell], name: str, link: str) -> None:
    for x, cell in zip(xs, cells, strict=True):
        values = [1000 * getattr(move, name) for move in cell.moves]
        axis.scatter([x] * len(values), values, s=8, color=_COLORS[link], alpha=0.45, linewidths=0)
        label = link if cell is cells[0] else None
        axis.hlines(1000 * cell.median(name), x - 0.07, x + 0.07, color=_COLORS[link], linewidth=2.2, label=label)


def _bar_of_pause(axis: Any, xs: list[float], cells: list[Cell]) -> None:
    for x, cell in zip(xs, cells, strict=True):
        if cell.link in MORE_THAN_A_STEP:
            most = 1000 * (cell.median("step") + MORE_THAN_A_STEP[cell.link])
            axis.hlines(most, x - 0.08, x + 0.08, color="black", linestyle=":", linewidth=1.2)

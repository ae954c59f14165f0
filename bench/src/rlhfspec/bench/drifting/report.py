"""Table and plot of `rlhfspec bench drift`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group

from rlhfspec.bench.drifting.drift import FROZEN, LEARNING, DriftResults
from rlhfspec.bench.tables import ending, table_of
from rlhfspec.simulator.picture import drawn

_COLORS = {FROZEN: "#30638e", LEARNING: "#d1495b"}
_LABELS = {FROZEN: "drafter left as it was", LEARNING: "drafter that learns"}


def render(results: DriftResults) -> Group:
    table = table_of("tokens a verification (tokens a CPU second)", ("step", FROZEN, LEARNING))
    for frozen, learning in zip(results.of(FROZEN), results.of(LEARNING), strict=True):
        cells = (f"{row.tokens_per_verification:.2f} ({row.tokens_per_second:.0f})" for row in (frozen, learning))
        table.add_row(str(frozen.step), *cells)
    return Group(table, *ending(results))


def plot(results: DriftResults, path: Path) -> None:
    with drawn(path, figsize=(8, 6)) as figure:
        accepted, speed = figure.subplots(2, 1, sharex=True)
        for mode, color in _COLORS.items():
            rows = results.of(mode)
            steps = [row.step for row in rows]
            look = {"color": color, "label": _LABELS[mode], "marker": ".", "linewidth": 1.5}
            accepted.plot(steps, [row.tokens_per_verification for row in rows], **look)
            speed.plot(steps, [row.tokens_per_second for row in rows], **look)
        accepted.set(ylabel="tokens a verification", title="The same responses while the policy is trained")
        speed.set(ylabel="tokens a CPU second", xlabel="training step")
        accepted.legend(loc="lower right")
        for axis in (accepted, speed):
            axis.margins(y=0.2)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)

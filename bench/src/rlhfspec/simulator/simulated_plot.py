"""Plots of simulated stages (generators over time, lengths, moves) and of simulated serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhfspec.common.arrays import Floats
from rlhfspec.simulator.lengths import Ints, Workload
from rlhfspec.simulator.picture import drawn
from rlhfspec.simulator.scenario import StageOutcome
from rlhfspec.simulator.serving import GOOD_SHARE, PlacementFound

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 400  # moments drawn
_BLUE, _ORANGE, _GREY = "#0072b2", "#e69f00", "#9a9a9a"


def draw(outcomes: Mapping[str, StageOutcome], work: Workload, num_generators: int, path: Path, *, title: str) -> None:
    """Draw running sequences, moves and unfinished sequences over time, one row per policy, then the lengths."""
    with drawn(path, dpi=110, figsize=(13, 2.6 * len(outcomes) + 2.8)) as figure:
        grid = figure.add_gridspec(len(outcomes) + 1, 2, width_ratios=[3, 1])
        longest = max(outcome.seconds for outcome in outcomes.values())
        maps = {name: running(outcome, num_generators, longest) for name, outcome in outcomes.items()}
        most = max(int(counts.max()) for counts in maps.values())
        for row, (name, outcome) in enumerate(outcomes.items()):
            left = figure.add_subplot(grid[row, 0])
            image = _generators(left, name, outcome, maps[name], longest, most)
            figure.colorbar(image, ax=left, label="sequences", pad=0.01)
            _unfinished(figure.add_subplot(grid[row, 1]), outcome, longest)
        _lengths(figure.add_subplot(grid[-1, :]), work)
        figure.suptitle(title)


def running(outcome: StageOutcome, num_generators: int, seconds: float) -> Ints:
    """Return [generators, moments]: the number of running sequences at even moments until `seconds`.

    >>> running(StageOutcome(timeline=[(0.0, 0, 3), (5.0, 0, 0)]), 1, 10.0)[0, [0, 100, 300]].tolist()
    [3, 3, 0]
    """
    moments = np.linspace(0, seconds, _COLUMNS, endpoint=False)
    counts = np.zeros((num_generators, _COLUMNS), dtype=np.int64)
    by_generator: dict[int, list[tuple[float, int]]] = {}
    for time, generator, count in outcome.timeline:
        by_generator.setdefault(generator, []).append((time, count))
    for generator, changes in by_generator.items():
        times = np.array([time for time, _ in changes])
        values = np.array([0, *(count for _, count in changes)])
        counts[generator] = values[np.searchsorted(times, moments, side="right")]
    return counts


def _generators(axis: Axes, name: str, outcome: StageOutcome, counts: Ints, longest: float, most: int) -> Any:
    shown: Floats = np.where(counts > 0, counts, np.nan)
    image = axis.imshow(
        shown,
        aspect="auto",
        interpolation="nearest",
        extent=(0, longest, len(counts) - 0.5, -0.5),
        cmap="viridis",
        vmin=0,
        vmax=most,
    )
    moves = outcome.moves if len(outcome.moves) <= 2000 else []
    for move in moves:
        axis.plot(
            [move.left_seconds, move.landed_seconds],
            [move.source, move.destination],
            color=_ORANGE,
            linewidth=0.5,
            alpha=0.6,
        )
    axis.axvline(outcome.seconds, color=_GREY, linestyle=":")
    axis.set(ylabel="generator", title=f"{name}: {outcome.seconds:.2f} s, {len(outcome.moves)} moves", xlabel="seconds")
    axis.locator_params(axis="y", integer=True)
    return image


def _unfinished(axis: Axes, outcome: StageOutcome, longest: float) -> None:
    ended = np.sort(outcome.ended) / 1e9
    axis.step([0, *ended], [len(ended), *range(len(ended) - 1, -1, -1)], where="post", color=_BLUE)
    axis.set(xlim=(0, longest), yscale="log", ylim=(0.8, None), xlabel="seconds", ylabel="unfinished")
    axis.grid(alpha=0.3)


def _lengths(axis: Axes, work: Workload) -> None:
    axis.hist(work.lengths, bins=min(60, work.limit), color=_BLUE)
    axis.set(
        xlabel="tokens of a response", ylabel="sequences", title=f"{work.num_sequences} lengths, at most {work.limit}"
    )
    axis.grid(alpha=0.3)


def draw_serving(found: Sequence[PlacementFound], path: Path, *, title: str) -> None:
    """Draw the share of requests within the targets by their rate, and the seconds of a stage, by placement."""
    with drawn(path, dpi=110, figsize=(11, 4.2)) as figure:
        serving, stage = figure.subplots(1, 2, width_ratios=[3, 2])
        for each in found:
            rates, shares = zip(*each.shares, strict=True)
            label = f"{each.placement}, chunk {each.placement.chunk}: {each.goodput:.3g}"
            serving.plot(rates, shares, marker="o", markersize=3, label=label)
        serving.axhline(GOOD_SHARE, color=_GREY, linestyle=":")
        serving.set(xlabel="requests a second", ylabel="share within the targets", ylim=(0, 1.02))
        serving.set_xlim(0, 1.5 * max(found[0].goodput, min(rates)))
        serving.legend()
        names = [str(each.placement) for each in found]
        stage.barh(names, [each.stage_seconds for each in found], color=_BLUE)
        stage.invert_yaxis()
        stage.set(xlabel="seconds of a stage: all prompts at once")
        for axis in (serving, stage):
            axis.grid(alpha=0.3)
        figure.suptitle(title)

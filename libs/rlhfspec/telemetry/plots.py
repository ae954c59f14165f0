"""Pictures of a run, and of several runs beside each other. Colours are Okabe and Ito's, told apart by everyone.

matplotlib is imported when a picture is drawn, and no window system is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfspec.telemetry.metrics import StepMetrics
from rlhfspec.telemetry.text import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#9a9a9a",
)  # fmt: skip
STAGE_COLOURS = {
    "generation": BLUE, "reward": ORANGE, "reference": SKY, "critic": PURPLE, "training": GREEN, "checkpoint": GREY,
}  # fmt: skip
Steps = Sequence[StepMetrics]
_FEW_STEPS = 20
_MOST_BESIDE = 3


def overview(steps: Steps, path: Path, *, title: str) -> None:
    """Everything of one run at a glance: did it learn, how far did it drift, how long, how fast, where time went."""
    _save(overview_figure(steps, title=title), path)


def compare(runs: Mapping[str, Steps], path: Path) -> None:
    """Reward, and below it the KL where there is one, of runs by their names; every row has one scale."""
    _save(comparison_figure(runs), path)


def overview_figure(steps: Steps, *, title: str) -> Figure:
    assert steps, "a picture needs a step"
    figure = _figure(14.0, 7.0)
    figure.suptitle(_plain(title), fontsize=14, fontweight="bold")
    grid = figure.add_gridspec(2, 4)
    _reward(figure.add_subplot(grid[0, :2]), steps)
    _kl(figure.add_subplot(grid[0, 2]), steps)
    _histograms(figure.add_subplot(grid[0, 3]), steps)
    _lengths(figure.add_subplot(grid[1, 0]), steps)
    _speed(figure.add_subplot(grid[1, 1]), steps)
    _accepted(figure.add_subplot(grid[1, 2]), steps)
    _seconds(figure.add_subplot(grid[1, 3]), steps)
    return figure


def comparison_figure(runs: Mapping[str, Steps]) -> Figure:
    assert runs
    assert all(runs.values()), "a picture needs a step"
    rows = [_reward, _kl] if any(metrics.kl is not None for steps in runs.values() for metrics in steps) else [_reward]
    num_columns = min(len(runs), _MOST_BESIDE)
    num_blocks = -(-len(runs) // num_columns)
    heights = ([2.0, 1.0] if len(rows) == 2 else [1.0]) * num_blocks
    figure = _figure(5.2 * num_columns, (4.8 if len(rows) == 2 else 3.4) * num_blocks)
    grid = figure.add_gridspec(len(heights), num_columns, height_ratios=heights)
    first: dict[int, Axes] = {}
    for place, (name, steps) in enumerate(runs.items()):
        block, column = divmod(place, num_columns)
        for row, draw in enumerate(rows):
            axis = figure.add_subplot(grid[block * len(rows) + row, column], sharey=first.get(row))
            first.setdefault(row, axis)
            draw(axis, steps)
            if row == 0:
                axis.set_title(_plain(f"{name}: {_change(steps)}"), loc="left", fontweight="bold")
                axis.set_ylabel("reward")
    return figure


def _reward(axis: Axes, steps: Steps) -> None:
    x = [metrics.step for metrics in steps]
    means = [metrics.reward.mean for metrics in steps]
    low = [max(metrics.reward.min, metrics.reward.mean - metrics.reward.std) for metrics in steps]
    high = [min(metrics.reward.max, metrics.reward.mean + metrics.reward.std) for metrics in steps]
    axis.fill_between(x, low, high, color=BLUE, alpha=0.15, linewidth=0, label="one standard deviation of samples")
    if len(steps) > _FEW_STEPS:
        axis.plot(x, means, color=BLUE, alpha=0.4, linewidth=1.0)
        axis.plot(x, _smooth(means), color=BLUE, linewidth=2.4, label="mean, smoothed over neighbours")
    else:
        _line(axis, steps, means, BLUE, label="mean")
    _dress(axis, f"reward: {_change(steps)}", steps, legend=True)


def _kl(axis: Axes, steps: Steps) -> None:
    points = {metrics.step: metrics.kl for metrics in steps if metrics.kl is not None}
    _points(axis, points, RED, otherwise="no reference in this job")
    _dress(axis, "KL to the reference, nats a token", steps)


def _histograms(axis: Axes, steps: Steps) -> None:
    """Of the first and the last step; their edges are the same."""
    styles: list[dict[str, Any]] = [{"color": GREY, "fill": True, "alpha": 0.5}, {"color": BLUE}]
    for metrics, style in zip([steps[0], *steps[1:][-1:]], styles, strict=False):
        lengths = metrics.response_length
        shares = [100 * count / sum(lengths.histogram) for count in lengths.histogram]
        axis.stairs(shares, lengths.edges, linewidth=2, label=f"step {metrics.step}", **style)
    _dress(axis, "response lengths, % of samples", None, legend=True)


def _lengths(axis: Axes, steps: Steps) -> None:
    _line(axis, steps, [metrics.response_length.mean for metrics in steps], BLUE, label="mean")
    _line(axis, steps, [metrics.response_length.p95 for metrics in steps], ORANGE, label="95th percentile")
    _from_zero(axis)
    _dress(axis, "response length, tokens", steps, legend=True)


def _speed(axis: Axes, steps: Steps) -> None:
    _line(axis, steps, [metrics.tokens_per_second for metrics in steps], GREEN)
    _from_zero(axis)
    _dress(axis, "generation, tokens/s", steps)


def _accepted(axis: Axes, steps: Steps) -> None:
    points = {m.step: m.accepted_per_verification for m in steps if m.accepted_per_verification is not None}
    _points(axis, points, PURPLE, otherwise="nothing was drafted")
    _dress(axis, "drafted tokens accepted per verification", steps)


def _seconds(axis: Axes, steps: Steps) -> None:
    """Work of the stages on top of each other, and what passed: below their sum where stages overlap."""
    edges = [steps[0].step - 0.5, *(metrics.step + 0.5 for metrics in steps)]
    bottom = [0.0] * len(steps)
    for stage, colour in STAGE_COLOURS.items():
        seconds = [float(getattr(metrics.seconds, stage)) for metrics in steps]
        if any(seconds):
            top = [low + more for low, more in zip(bottom, seconds, strict=True)]
            axis.stairs(top, edges, baseline=bottom, fill=True, color=colour, label=stage)
            bottom = top
    axis.stairs([metrics.seconds.step for metrics in steps], edges, baseline=None, color="black", label="passed")
    axis.set_ylim(0, 1.45 * max([*bottom, *(metrics.seconds.step for metrics in steps)]))  # room for the legend
    _dress(axis, "seconds a step, by stage", steps)
    axis.legend(fontsize=7, ncols=3, frameon=False, loc="upper left", columnspacing=0.9, handlelength=1.2)


def _line(axis: Axes, steps: Steps, values: Sequence[float], colour: str, label: str | None = None) -> None:
    marker = "o" if len(steps) <= _FEW_STEPS else None
    axis.plot([m.step for m in steps], values, color=colour, linewidth=1.8, marker=marker, markersize=4, label=label)


def _points(axis: Axes, points: Mapping[int, float], colour: str, *, otherwise: str) -> None:
    """By step, from zero; where a job has no such number the panel says why."""
    if points:
        marker = "o" if len(points) <= _FEW_STEPS else None
        axis.plot(list(points), list(points.values()), color=colour, linewidth=1.8, marker=marker, markersize=4)
        _from_zero(axis)
    else:
        axis.text(0.5, 0.5, otherwise, ha="center", va="center", transform=axis.transAxes, color=GREY)
        axis.tick_params(left=False, labelleft=False)  # ticks themselves may be shared with a neighbour


def _from_zero(axis: Axes) -> None:
    """Unlike a limit it leaves the other end free, also where panels share a scale."""
    axis.axhline(0, linewidth=0)


def _dress(axis: Axes, title: str, steps: Steps | None, *, legend: bool = False) -> None:
    """`steps` where they are what the panel goes along; else it goes along tokens."""
    axis.set_title(_plain(title), fontsize=10, loc="left")
    axis.set_xlabel("tokens" if steps is None else "step", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if steps is not None:
        from matplotlib.ticker import MaxNLocator

        axis.set_xlim(steps[0].step - 0.5, steps[-1].step + 0.5)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
    if legend:
        axis.legend(fontsize=8, frameon=False)


def ends(steps: Steps) -> tuple[float, float]:
    """Mean reward of the first and of the last few steps: a tenth of them, five at most.

    >>> from rlhfspec.telemetry.metrics import example_step
    >>> ends([example_step(step=step, reward=step / 10) for step in range(1, 10)])
    (0.1, 0.9)
    """
    few = num_of_ends(steps)
    means = [metrics.reward.mean for metrics in steps]
    return sum(means[:few]) / few, sum(means[-few:]) / few


def num_of_ends(steps: Steps) -> int:
    return min(5, max(1, len(steps) // 10))


def _change(steps: Steps) -> str:
    first, last = ends(steps)
    return f"{number(first)} to {number(last)}" if len(steps) > 1 else number(last)


def _smooth(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours."""
    reach = max(2, len(values) // 20)
    windows = [values[max(0, place - reach) : place + reach + 1] for place in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _plain(text: str) -> str:
    """matplotlib would set what stands between dollars as mathematics."""
    return text.replace("$", r"\$")


def _figure(width_inches: float, height_inches: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    """Without a version in the file: the same numbers give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    options: dict[str, Any] = {"format": "png", "dpi": 110, "metadata": {"Software": None}}
    figure.savefig(temporary, **options)
    temporary.replace(path)

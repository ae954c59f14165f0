"""Plots of one run or several side by side, in Okabe and Ito's colour-blind safe colours.

matplotlib is imported when a plot is drawn, and needs no display.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfspec.messages.records.evaluations import Evaluation, best
from rlhfspec.messages.records.metrics import StepMetrics
from rlhfspec.runs.view.learning_signs import DISTINCT, warning_of
from rlhfspec.runs.view.text import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#9a9a9a",
)  # fmt: skip
STAGE_COLOURS = {
    "generation": BLUE, "reward": ORANGE, "reference": SKY, "critic": PURPLE, "training": GREEN, "checkpoint": GREY,
}  # fmt: skip
COMPONENT_COLOURS = (ORANGE, GREEN, PURPLE, SKY, RED, YELLOW)
Steps = Sequence[StepMetrics]
Evaluations = Sequence[Evaluation]
Points = Mapping[int, float]  # by step
Panels = list[tuple[float, Callable[["Axes"], None]]]  # (width, function that draws the panel)
_FEW_STEPS = 20
_MOST_BESIDE = 3
_ROUNDING = 1e-6  # the mean of a step's advantages is 0 up to it
_WIDE = 2.0  # relative to a normal panel
_NOISE_HEIGHT = 1e-6  # with one update per step the policy loss is only rounding


def overview(steps: Steps, path: Path, *, title: str, evaluations: Evaluations = ()) -> None:
    _save(overview_figure(steps, title=title, evaluations=evaluations), path)


def compare(runs: Mapping[str, Steps], path: Path, *, evaluations: Mapping[str, Evaluations] | None = None) -> None:
    """Plot reward and KL of runs by name to `path`, with one scale per row."""
    _save(comparison_figure(runs, evaluations=evaluations), path)


def overview_figure(steps: Steps, *, title: str, evaluations: Evaluations = ()) -> Figure:
    assert steps, "a picture needs a step"
    figure = _figure(18.0, 10.0)
    figure.suptitle(_plain(title), fontsize=15, fontweight="bold")
    if warning := warning_of(steps, evaluations):
        figure.supxlabel(_plain(warning), color=RED, fontsize=10)
    rows = figure.add_gridspec(3, 1)
    panels_of_rows = (_outcome_panels(steps, evaluations), _learning_panels(steps), _running_panels(steps))
    for row, panels in enumerate(panels_of_rows):
        grid = rows[row].subgridspec(1, len(panels), width_ratios=[width for width, _ in panels])
        for column, (_, draw) in enumerate(panels):
            axis = figure.add_subplot(grid[column])
            draw(axis)
            _scale(axis)
    return figure


def _outcome_panels(steps: Steps, evaluations: Evaluations) -> Panels:
    names = dict.fromkeys(name for metrics in steps for name in metrics.reward_components)
    sources = [
        (name, colour, {m.step: m.reward_components[name] for m in steps if name in m.reward_components})
        for name, colour in zip(names, cycle(COMPONENT_COLOURS), strict=False)
    ]
    mean = {metrics.step: metrics.response_length.mean for metrics in steps}
    p95 = {metrics.step: float(metrics.response_length.p95) for metrics in steps}
    return [
        (_WIDE, lambda axis: _reward(axis, steps, evaluations)),
        *(_curves("rewards by source, before weights", steps, *sources) if len(sources) > 1 else []),
        *_curves("response length, tokens", steps, ("mean", BLUE, mean), ("95th percentile", ORANGE, p95)),
        (1.0, lambda axis: _histograms(axis, steps)),
    ]


def _learning_panels(steps: Steps) -> Panels:
    loss = ("policy", BLUE, {metrics.step: metrics.policy_loss for metrics in steps})
    kl_loss = ("KL, before its coefficient", RED, _found(steps, lambda metrics: metrics.kl_loss))
    gradient = ("policy", GREEN, {metrics.step: metrics.grad_norm for metrics in steps})
    critic = ("critic", ORANGE, _found(steps, lambda metrics: metrics.learning.get("critic_grad_norm")))
    clipped = ("", SKY, {metrics.step: 100 * metrics.clip_fraction for metrics in steps})
    equal = _found(
        steps, lambda metrics: None if metrics.equal_reward_groups is None
        else 100 * metrics.equal_reward_groups / metrics.num_prompts
    )  # fmt: skip
    distinct = _found(steps, lambda metrics: metrics.learning.get(DISTINCT))
    return [
        *(_curves("policy loss", steps, loss, kl_loss) if _varies(loss, kl_loss) else []),
        *_curves("gradient norm, before clipping", steps, gradient, critic),
        *(_curves("clipped tokens, %", steps, clipped) if _varies(clipped) else []),
        *_curves("groups with equal rewards, %", steps, ("", RED, equal)),
        *_curves("distinct responses per prompt", steps, ("", BLUE, distinct)),
        *_curves("entropy, nats per token", steps, ("", PURPLE, {metrics.step: metrics.entropy for metrics in steps})),
        *_kl(steps),
    ]


def _varies(*curves: tuple[str, str, Points]) -> bool:
    """Return whether any curve has values other than 0."""
    return any(abs(value) > _ROUNDING for _, _, points in curves for value in points.values())


def _running_panels(steps: Steps) -> Panels:
    explained = _found(steps, lambda metrics: metrics.explained_variance)
    shown = {step: max(value, -1.0) for step, value in explained.items()}  # lower values would hide all others
    speed = _found(steps, lambda metrics: metrics.tokens_per_second)
    accepted = _found(steps, lambda metrics: metrics.accepted_per_verification)
    return [
        *_curves("critic loss", steps, ("", ORANGE, _found(steps, lambda metrics: metrics.value_loss))),
        *_curves("explained variance of the returns", steps, ("", ORANGE, shown)),
        *_curves("generation, tokens/s", steps, ("", GREEN, speed)),
        *_curves("accepted per verification", steps, ("", PURPLE, accepted)),
        (_WIDE, lambda axis: _seconds(axis, steps)),
    ]


def _kl(steps: Steps) -> Panels:
    names = dict.fromkeys(name for metrics in steps for name in metrics.kl or {})
    estimates = [
        (name, RED if name == "k3" else GREY, {m.step: m.kl[name] for m in steps if m.kl is not None}) for name in names
    ]
    return _curves(f"KL to the reference, nats per token{' (k3)' if len(names) == 1 else ''}", steps, *estimates)


def _curves(title: str, steps: Steps, *curves: tuple[str, str, Points]) -> Panels:
    shown = [curve for curve in curves if curve[2]]

    def draw(axis: Axes) -> None:
        for label, colour, points in shown:
            _trend(axis, points, colour, label=label if len(shown) > 1 else None)
        axis.axhline(0, color="black", linewidth=0.6, alpha=0.5)
        _dress(axis, title, steps, legend=len(shown) > 1)

    return [(1.0, draw)] if shown else []


def comparison_figure(runs: Mapping[str, Steps], *, evaluations: Mapping[str, Evaluations] | None = None) -> Figure:
    assert runs
    assert all(runs.values()), "a picture needs a step"
    num_rows = 2 if any(map(_kl, runs.values())) else 1
    num_columns = min(len(runs), _MOST_BESIDE)
    num_blocks = -(-len(runs) // num_columns)
    figure = _figure(5.2 * num_columns, (4.8 if num_rows == 2 else 3.4) * num_blocks)
    grid = figure.add_gridspec(num_rows * num_blocks, num_columns, height_ratios=[2.0, 1.0][:num_rows] * num_blocks)
    first: dict[int, Axes] = {}
    for place, (name, steps) in enumerate(runs.items()):
        block, column = divmod(place, num_columns)
        for row in range(num_rows):
            axis = figure.add_subplot(grid[block * num_rows + row, column], sharey=first.get(row))
            first.setdefault(row, axis)
            if row == 0:
                _reward(axis, steps, (evaluations or {}).get(name, ()))
                axis.set_title(_plain(f"{name}: {_change(steps)}"), loc="left", fontweight="bold")
                axis.set_ylabel("reward")
            elif panels := _kl(steps):
                panels[0][1](axis)
            else:
                axis.text(0.5, 0.5, "no reference", ha="center", va="center", transform=axis.transAxes, color=GREY)
                _dress(axis, "KL to the reference", steps)
    return figure


def _reward(axis: Axes, steps: Steps, evaluations: Evaluations) -> None:
    low = [max(metrics.reward.min, metrics.reward.mean - metrics.reward.std) for metrics in steps]
    high = [min(metrics.reward.max, metrics.reward.mean + metrics.reward.std) for metrics in steps]
    means = {metrics.step: metrics.reward.mean for metrics in steps}
    axis.fill_between(
        list(means), low, high, color=BLUE, alpha=0.12, linewidth=0, label="one standard deviation of samples"
    )
    _trend(axis, means, BLUE, label="mean, smoothed over neighbours" if len(steps) > _FEW_STEPS else "mean")
    places = [evaluation.step for evaluation in evaluations]
    if evaluations:
        rewards, top = [evaluation.reward.mean for evaluation in evaluations], best(evaluations)
        axis.plot(places, rewards, color=RED, linewidth=1.6, marker="D", markersize=4, label="held-out prompts")
        label = f"best: {number(top.reward.mean)} after step {top.step}"
        axis.plot(top.step, top.reward.mean, color=RED, marker="*", markersize=14, linestyle="none", label=label)
    _dress(axis, f"reward: {_change(steps)}", steps, legend=True)
    axis.set_xlim(min([steps[0].step, *places]) - 0.5, max([steps[-1].step, *places]) + 0.5)


def _histograms(axis: Axes, steps: Steps) -> None:
    styles: list[dict[str, Any]] = [{"color": GREY, "fill": True, "alpha": 0.5}, {"color": BLUE}]
    for metrics, style in zip([steps[0], *steps[1:][-1:]], styles, strict=False):
        lengths = metrics.response_length
        shares = [100 * count / sum(lengths.histogram) for count in lengths.histogram]
        axis.stairs(shares, lengths.edges, linewidth=2, label=f"step {metrics.step}", **style)
    _dress(axis, "response lengths, % of samples", None, legend=True)


def _seconds(axis: Axes, steps: Steps) -> None:
    """Draw each step's seconds by stage, stacked, and its wall time."""
    edges = [steps[0].step - 0.5, *(metrics.step + 0.5 for metrics in steps)]
    bottom = [0.0] * len(steps)
    for stage, colour in STAGE_COLOURS.items():
        seconds = [float(getattr(metrics.seconds, stage)) for metrics in steps]
        if any(seconds):
            top = [low + more for low, more in zip(bottom, seconds, strict=True)]
            axis.stairs(top, edges, baseline=bottom, fill=True, color=colour, label=stage)
            bottom = top
    axis.stairs([metrics.seconds.step for metrics in steps], edges, baseline=None, color="black", label="wall time")
    axis.set_ylim(0, 1.45 * max([*bottom, *(metrics.seconds.step for metrics in steps)]))  # room for the legend
    _dress(axis, "seconds per step, by stage", steps)
    axis.legend(fontsize=7, ncols=3, frameon=False, loc="upper left", columnspacing=0.9, handlelength=1.2)


def _found(steps: Steps, value: Callable[[StepMetrics], float | None]) -> Points:
    return {metrics.step: found for metrics in steps if (found := value(metrics)) is not None}


def _trend(axis: Axes, points: Points, colour: str, label: str | None = None) -> None:
    x, y = list(points), list(points.values())
    if len(points) <= _FEW_STEPS:
        axis.plot(x, y, color=colour, linewidth=1.8, marker="o", markersize=4, label=label)
    else:
        axis.plot(x, y, color=colour, alpha=0.3, linewidth=1.0)
        axis.plot(x, _smooth(y), color=colour, linewidth=2.0, label=label)


def _scale(axis: Axes) -> None:
    """Start the y axis at zero if no value is negative, and flatten rounding noise."""
    low, height = axis.dataLim.ymin, axis.dataLim.height
    if height < _NOISE_HEIGHT:
        axis.set_ylim(-1 if low < 0 else 0, 1)
    elif low > -_NOISE_HEIGHT * height:
        axis.set_ylim(bottom=0)


def _dress(axis: Axes, title: str, steps: Steps | None, *, legend: bool = False) -> None:
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
    """Return the mean reward of the first and of the last `num_of_ends(steps)` steps."""
    few = num_of_ends(steps)
    means = [metrics.reward.mean for metrics in steps]
    return sum(means[:few]) / few, sum(means[-few:]) / few


def num_of_ends(steps: Steps) -> int:
    return min(5, max(1, len(steps) // 10))


def _change(steps: Steps) -> str:
    first, last = ends(steps)
    return f"{number(first)} to {number(last)}" if len(steps) > 1 else number(last)


def _smooth(values: Sequence[float]) -> list[float]:
    reach = max(2, len(values) // 20)
    windows = [values[max(0, place - reach) : place + reach + 1] for place in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _plain(text: str) -> str:
    """Escape dollar signs, which matplotlib would typeset as mathematics."""
    return text.replace("$", r"\$")


def _figure(width_inches: float, height_inches: float) -> Figure:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns about an unwritable home
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches))
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    return figure


def _save(figure: Figure, path: Path) -> None:
    """Save without version metadata, so that equal numbers give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    options: dict[str, Any] = {"format": "png", "dpi": 110, "metadata": {"Software": None}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about missing glyphs, drawn as boxes
        figure.savefig(temporary, **options)
    temporary.replace(path)

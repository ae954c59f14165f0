"""Plot of a batch draining in plain and adaptive mode, and of the chosen strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhfspec.bench.draining.batch import DrainingStep, Trace
from rlhfspec.simulator.picture import drawn

_COLORS = {"plain": "#30638e", "adaptive": "#d1495b"}
_SPEED_WINDOW = 15  # steps over which tokens/s is averaged


def draw(plain: Trace, adaptive: Trace, path: Path) -> None:
    with drawn(path, figsize=(9, 8.5)) as figure:
        speed, active, strategy = figure.subplots(3, 1, sharex=True, height_ratios=[2, 2, 1.6])
        for trace in (plain, adaptive):
            color = _COLORS[trace.mode]
            label = f"{trace.mode}: {trace.tokens_per_second:.0f} tokens/s"
            speed.plot(*_speeds(trace.steps), color=color, label=label)
            active.step(_seconds(trace), [step.num_active for step in trace.steps], color=color, where="pre")
            active.axvline(trace.seconds, color=color, linestyle=":", linewidth=1)
        speed.set(ylabel="tokens/s", title=_title(plain, adaptive))
        speed.legend(loc="upper right")
        active.set(ylabel="active sequences")
        _strategies(strategy, adaptive)
        for axis in (speed, active, strategy):
            axis.grid(alpha=0.3)


def _title(plain: Trace, adaptive: Trace) -> str:
    same = "the same tokens" if plain.digest == adaptive.digest else "DIFFERENT TOKENS"
    return (
        f"{len(plain.completions)} sequences, {plain.num_tokens} tokens: {same} in "
        f"{adaptive.seconds:.1f} s instead of {plain.seconds:.1f} s (×{plain.seconds / adaptive.seconds:.2f})"
    )


def _strategies(axis: Any, trace: Trace) -> None:
    """Draw a dot per step at its strategy's line, sized by verified nodes per sequence."""
    counts: dict[str, int] = {}
    for step in trace.steps:
        counts[step.strategy] = counts.get(step.strategy, 0) + 1
    names = sorted(counts, key=lambda name: -counts[name])[:8]
    steps = [step for step in trace.steps if step.strategy in names]
    axis.scatter(
        [step.seconds for step in steps],
        [names.index(step.strategy) for step in steps],
        s=[8 + 5 * step.num_verified_nodes / max(step.num_active, 1) for step in steps],
        color=_COLORS["adaptive"],
        alpha=0.5,
        linewidths=0,
    )
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel="seconds", ylabel="adaptive chose")


def _speeds(steps: list[DrainingStep]) -> tuple[list[float], list[float]]:
    seconds, speeds = [], []
    for end in range(_SPEED_WINDOW, len(steps)):
        window = steps[end - _SPEED_WINDOW + 1 : end + 1]
        elapsed = steps[end].seconds - steps[end - _SPEED_WINDOW].seconds
        seconds.append(steps[end].seconds)
        speeds.append(sum(step.num_tokens for step in window) / elapsed)
    return seconds, speeds


def _seconds(trace: Trace) -> list[float]:
    return [step.seconds for step in trace.steps]

"""Plot of `rlhfspec bench rebalance`: running sequences by arm, and all stage times."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from rlhfspec.bench.moving.rebalancing.arms import ARMS, OURS
from rlhfspec.bench.moving.rebalancing.prediction import IDEAL
from rlhfspec.bench.moving.rebalancing.results import RebalanceResults, StageResult, StageRun
from rlhfspec.simulator.picture import drawn

_COLORS = {"dealt": "#8d99ae", "pulled": "#edae49", "ours": "#d1495b", "clairvoyant": "#30638e"}
_HALVES = ("#d1495b", "#30638e")


def plot(results: RebalanceResults, path: Path) -> None:
    """Draw a row per kind of stage: running sequences over time of the first seed, then the seconds of all seeds."""
    kinds: dict[tuple[str, str], list[StageResult]] = {}
    for stage in results.stages:
        kinds.setdefault((stage.decoding, stage.workload), []).append(stage)
    arms = [arm for arm in ARMS if arm in results.settings["arms"]]
    with drawn(path, figsize=(2.9 * len(arms) + 4, 2.5 * len(kinds) + 0.6)) as figure:
        axes = figure.subplots(len(kinds), len(arms) + 1, squeeze=False)
        for row, ((decoding, workload), stages) in zip(axes, kinds.items(), strict=True):
            shown = stages[0]
            latest = max(run.seconds for arm in arms for run in shown.runs[arm])
            for axis, arm in zip(row, arms, strict=False):
                _activity(axis, middle(shown.runs[arm]), latest)
            row[0].set_ylabel(f"{decoding}, {workload}\nsequences running", fontsize=9)
            _seconds(row[-1], stages, arms)
        for axis in axes[-1]:
            axis.set_xlabel("seconds" if axis is not axes[-1][-1] else "stage")
        axes[0][0].legend(loc="upper right", fontsize=7)
        axes[0][-1].legend(loc="best", fontsize=7)
        figure.suptitle(f"{results.cpu}: two generators, one core each, synthetic lengths", fontsize=10)


def middle(runs: tuple[StageRun, ...]) -> StageRun:
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


def _activity(axis: Any, run: StageRun, latest: float) -> None:
    for number, (changes, color) in enumerate(zip(run.active, _HALVES, strict=False)):
        times = [at for at, _ in changes] + [run.ends[number]]
        counts = [count for _, count in changes] + [0]
        axis.step(times, counts, where="post", color=color, label=f"generator {number}")
        axis.axvline(run.ends[number], color=color, linestyle=":", linewidth=1)
    for at, source, _ in run.moves:
        axis.axvline(at, ymax=0.05, color=_HALVES[source], linewidth=1)
    moved = f", {len(run.moves)} moves" if run.arm == OURS else ""
    axis.set_title(f"{run.arm}: {run.seconds:.1f} s{moved}", fontsize=9)
    axis.set(xlim=(0, latest * 1.03), ylim=(0, None))
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)


def _seconds(axis: Any, stages: list[StageResult], arms: list[str]) -> None:
    """Draw repetitions as dots and medians as lines, a column per seed."""
    for column, stage in enumerate(stages):
        for place, arm in enumerate(arms):
            x = column + (place - (len(arms) - 1) / 2) * 0.18
            seconds = stage.seconds(arm)
            label = arm if column == 0 else None
            axis.scatter([x] * len(seconds), seconds, s=10, color=_COLORS[arm], alpha=0.6, linewidths=0)
            axis.hlines(statistics.median(seconds), x - 0.08, x + 0.08, color=_COLORS[arm], linewidth=2, label=label)
        ideal = stage.predicted[IDEAL]
        label = "ideal sharing, by the curve" if column == 0 else None
        axis.hlines(ideal, column - 0.4, column + 0.4, color="black", linestyle=":", linewidth=1, label=label)
    axis.set_xticks(range(len(stages)), [f"seed {stage.seed}" for stage in stages], fontsize=8)
    axis.set(ylim=(0, None), ylabel="seconds")
    axis.grid(alpha=0.3, axis="y")

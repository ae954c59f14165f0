"""Plots of pipeline schedules, one row per stage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlhfspec.simulator.picture import drawn
from rlhfspec.simulator.pipelines.schedule import MODELS, PipelineSchedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {  # forward, backward
    0: ("#9ecae1", "#3182bd"),
    1: ("#fdd0a2", "#e6550d"),
}


def draw(schedules: Mapping[str, PipelineSchedule], path: Path, *, title: str) -> None:
    """Draw one panel per schedule, on one scale of time."""
    from matplotlib.patches import Patch

    num_stages = max(schedule.case.num_stages for schedule in schedules.values())
    size = (13, (0.32 * num_stages + 1.1) * len(schedules) + 0.8)
    with drawn(path, dpi=110, figsize=size) as figure:
        axes = figure.subplots(len(schedules), 1, sharex=True, squeeze=False)
        for panel, (name, schedule) in zip(axes[:, 0], schedules.items(), strict=True):
            _stages(panel, schedule)
            panel.set_title(f"{name}: {schedule.seconds:g}, {schedule.bubbles:.0%} idle", loc="left", fontsize=10)
        axes[-1, 0].set_xlabel("time, in forwards of the actor's micro-batch at a stage")
        kinds = [(model, kind) for model in range(len(MODELS)) for kind in (0, 1)]
        patches = [Patch(color=_COLORS[m][k], label=f"{MODELS[m]} {('forward', 'backward')[k]}") for m, k in kinds]
        figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False)
        figure.suptitle(title)


def _stages(axes: Axes, schedule: PipelineSchedule) -> None:
    is_readable = schedule.seconds <= 100  # boxes are wide enough for micro-batch numbers
    for each in schedule.placed:
        color = _COLORS[each.task.model][each.task.is_backward]
        axes.barh(each.stage, each.end - each.start, left=each.start, height=0.9, color=color, edgecolor="white")
        if is_readable:
            middle = (each.start + each.end) / 2
            axes.text(middle, each.stage, str(each.task.micro_batch), ha="center", va="center", fontsize=6)
    axes.invert_yaxis()
    axes.set_yticks(range(schedule.case.num_stages))
    axes.set_ylabel("stage")

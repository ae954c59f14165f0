"""The pictures show the numbers of the run, for runs of any size."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from rlhfspec.telemetry.metrics import StepMetrics, example_step
from rlhfspec.telemetry.plots import compare, comparison_figure, ends, overview, overview_figure


def a_run(num_steps: int, *, kl: bool = True, slope: float = 0.01) -> list[StepMetrics]:
    steps = [example_step(step=step, reward=slope * step) for step in range(1, num_steps + 1)]
    return steps if kl else [replace(metrics, kl=None, accepted_per_verification=None) for metrics in steps]


def panel(figure: Figure, title: str) -> Axes:
    (found,) = [axis for axis in figure.axes if title in axis.get_title(loc="left")]
    return found


def values(axis: Axes, line: int = 0) -> list[float]:
    return [float(value) for value in axis.lines[line].get_ydata()]  # type: ignore[union-attr]


def patches(axis: Axes) -> list[StepPatch]:
    return [patch for patch in axis.patches if isinstance(patch, StepPatch)]


def test_every_panel_shows_its_numbers() -> None:
    steps = a_run(12)
    figure = overview_figure(steps, title="sums")
    assert values(panel(figure, "reward")) == [metrics.reward.mean for metrics in steps]
    assert values(panel(figure, "KL")) == [metrics.kl for metrics in steps]
    assert values(panel(figure, "response length, tokens")) == [27.5] * 12
    assert values(panel(figure, "response length, tokens"), 1) == [60] * 12
    assert values(panel(figure, "tokens/s")) == [1234.5] * 12
    assert values(panel(figure, "accepted")) == [1.75] * 12
    assert "0.0100 to 0.120" in panel(figure, "reward").get_title(loc="left")


def test_seconds_are_stacked() -> None:
    axis = panel(overview_figure(a_run(3), title="sums"), "seconds")
    bottoms = {patch.get_label(): patch.get_data().baseline for patch in patches(axis) if patch.get_label() != "passed"}
    tops = {patch.get_label(): patch.get_data().values[0] for patch in patches(axis)}
    assert list(tops) == ["generation", "reward", "reference", "training", "checkpoint", "passed"], "no critic ran"
    assert tops == pytest.approx(
        {"generation": 2.0, "reward": 2.1, "reference": 2.5, "training": 4.0, "checkpoint": 4.2, "passed": 3.8}
    )
    assert [float(bottom[0]) for bottom in bottoms.values()] == pytest.approx([0.0, 2.0, 2.1, 2.5, 4.0])


def test_histograms_are_of_the_first_and_last_step() -> None:
    steps = a_run(5)
    axis = panel(overview_figure(steps, title="sums"), "response lengths")
    assert [patch.get_label() for patch in patches(axis)] == ["step 1", "step 5"]
    for patch in patches(axis):
        assert sum(patch.get_data().values) == pytest.approx(100.0)


def test_the_smoothed_line_follows_the_means() -> None:
    steps = a_run(100)
    axis = panel(overview_figure(steps, title="sums"), "reward")
    assert values(axis, 0) == [metrics.reward.mean for metrics in steps]
    assert values(axis, 1)[20:80] == pytest.approx([metrics.reward.mean for metrics in steps][20:80])


def test_what_a_job_does_not_have_is_said() -> None:
    figure = overview_figure(a_run(9, kl=False), title="sums")
    assert panel(figure, "KL").texts[0].get_text() == "no reference in this job"
    assert panel(figure, "accepted").texts[0].get_text() == "nothing was drafted"


def test_compared_runs_share_their_scale() -> None:
    figure = comparison_figure({"GRPO": a_run(9), "PPO": a_run(9, kl=False, slope=0.05), "DAPO": a_run(4)})
    assert len(figure.axes) == 6
    grpo, ppo = panel(figure, "GRPO"), panel(figure, "PPO")
    assert grpo.get_ylim() == ppo.get_ylim()
    assert ppo.get_ylim()[1] > 0.45
    assert values(ppo) == pytest.approx([0.05 * step for step in range(1, 10)])
    assert "PPO: 0.0500 to 0.450" in ppo.get_title(loc="left")


def test_runs_without_reference_are_compared_by_reward_alone() -> None:
    assert len(comparison_figure({"A": a_run(3, kl=False), "B": a_run(3, kl=False)}).axes) == 2


@pytest.mark.parametrize("num_steps", [1, 2, 21])
def test_a_picture_is_written_whole(tmp_path: Path, num_steps: int) -> None:
    path = tmp_path / "plots" / "training.png"
    overview(a_run(num_steps), path, title="costs $5 and $6_{")
    assert [entry.name for entry in path.parent.iterdir()] == ["training.png"]
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">II", data[16:24]) == (1540, 770)


def test_the_same_numbers_give_the_same_bytes(tmp_path: Path) -> None:
    runs = {"A": a_run(4), "B": a_run(5)}
    compare(runs, tmp_path / "a.png")
    compare(runs, tmp_path / "b.png")
    compare({"A": a_run(4), "B": a_run(6)}, tmp_path / "c.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "c.png").read_bytes()


@pytest.mark.parametrize(("num_steps", "first", "last"), [(1, 0.01, 0.01), (19, 0.01, 0.19), (100, 0.03, 0.98)])
def test_ends_are_means_of_a_tenth(num_steps: int, first: float, last: float) -> None:
    assert ends(a_run(num_steps)) == pytest.approx((first, last))

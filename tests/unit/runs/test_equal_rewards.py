"""Steps in which all groups have equal rewards are counted and shown."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from rlhfspec.messages.records.metrics import StepMetrics, example_step
from rlhfspec.runs.folder.run_folder import example_job
from rlhfspec.runs.view.equal_rewards import equal_reward_groups, equal_rewards_warning
from rlhfspec.runs.view.panel import panel
from rlhfspec.runs.view.progress import RunProgress
from rlhfspec.runs.view.summary import facts
from rlhfspec.runs.view.view import step_line

SAID = "rewards were equal in every group of the last 3 steps: nothing is learnt"


def steps(*equal_groups: int | None) -> list[StepMetrics]:
    return [
        replace(example_step(step=number), equal_reward_groups=equal) for number, equal in enumerate(equal_groups, 1)
    ]


@pytest.mark.parametrize(
    ("groups", "rewards", "equal"),
    [
        ("aabb", [1.0, 1.0, 0.0, 0.0], 2),
        ("abab", [1.0, 0.0, 1.0, 0.5], 1),
        ("aab", [1.0, 0.0, 0.5], 1),  # all but one sample of b were dropped: its advantage is zero too
        ("aabb", [1.0, 0.0, 0.0, 1.0], 0),
        ("abc", [1.0, 1.0, 1.0], None),
    ],
)
def test_counting(groups: str, rewards: list[float], equal: int | None) -> None:
    assert equal_reward_groups(groups, rewards) == equal


@pytest.mark.parametrize(
    ("equal_groups", "warns"),
    [((2, 2, 2), True), ((0, 2, 2, 2), True), ((2, 2), False), ((2, 1, 2), False), ((2, 2, 2, 1), False)],
)
def test_three_steps_running_are_said(equal_groups: tuple[int, ...], warns: bool) -> None:
    assert equal_rewards_warning(steps(*equal_groups)).startswith(SAID) is warns
    assert not equal_rewards_warning(steps(None, None, None))


def test_it_is_said_in_the_summary_the_picture_and_the_line() -> None:
    progress = RunProgress(example_job(steps=9), lambda: 0.0)
    progress.history(steps(2, 2, 2))
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(panel(progress, console.size, "stop"))
    assert "rewards were equal in every group" in console.export_text()
    assert SAID in step_line(progress.steps[-1], progress)
    assert SAID in dict(facts(progress.steps))["warning"]
    assert "warning" not in dict(facts(steps(2, 2, 1)))


def test_lines_of_before_can_still_be_read() -> None:
    line = example_step().to_line().replace('"equal_reward_groups": null, ', "")
    assert "equal" not in line
    assert StepMetrics.from_line(line).equal_reward_groups is None

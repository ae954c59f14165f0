"""Pictures show a run's numbers, for runs of any size; steps of equal rewards are counted and shown."""

import io
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from example_records import example_evaluation
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from rich.console import Console
from run_folders import example_job

from rlhfspec.messages.records.evaluations import Evaluation
from rlhfspec.messages.records.metrics import StepMetrics, example_step
from rlhfspec.runs.folder.sample_lines import effective_number
from rlhfspec.runs.view.learning_signs import collapse_of, equal_reward_groups, warning_of
from rlhfspec.runs.view.panel import panel
from rlhfspec.runs.view.plots import compare, comparison_figure, ends, overview, overview_figure
from rlhfspec.runs.view.progress import RunProgress
from rlhfspec.runs.view.summary import facts
from rlhfspec.runs.view.view import evaluation_line, step_line


def a_run(num_steps: int, *, kl: bool = True, slope: float = 0.01) -> list[StepMetrics]:
    steps = [example_step(step=step, reward=slope * step) for step in range(1, num_steps + 1)]
    return steps if kl else [replace(metrics, kl=None, accepted_per_verification=None) for metrics in steps]


def panel_of(figure: Figure, title: str) -> Axes:
    (found,) = [axis for axis in figure.axes if title in axis.get_title(loc="left")]
    return found


def values(axis: Axes, line: int = 0) -> list[float]:
    return [float(value) for value in axis.lines[line].get_ydata()]  # type: ignore[union-attr]


def patches(axis: Axes) -> list[StepPatch]:
    return [patch for patch in axis.patches if isinstance(patch, StepPatch)]


def test_every_panel_shows_its_numbers() -> None:
    figure = overview_figure(steps := a_run(12), title="sums")
    assert values(panel_of(figure, "reward")) == [metrics.reward.mean for metrics in steps]
    assert values(panel_of(figure, "KL")) == [metrics.kl_k3 for metrics in steps]
    assert values(panel_of(figure, "policy loss")) == [-0.01] * 12
    assert values(panel_of(figure, "policy loss"), 1) == [0.002] * 12
    assert values(panel_of(figure, "gradient norm")) == [0.8] * 12
    assert values(panel_of(figure, "clipped")) == [2.0] * 12
    assert values(panel_of(figure, "entropy")) == [1.5] * 12
    assert values(panel_of(figure, "response length, tokens")) == [27.5] * 12
    assert values(panel_of(figure, "response length, tokens"), 1) == [60] * 12
    assert values(panel_of(figure, "tokens/s")) == [1234.5] * 12
    assert values(panel_of(figure, "accepted per verification")) == [1.75] * 12
    assert "0.0100 to 0.120" in panel_of(figure, "reward").get_title(loc="left")


def test_seconds_are_stacked() -> None:
    axis = panel_of(overview_figure(a_run(3), title="sums"), "seconds")
    bottoms = {each.get_label(): each.get_data().baseline for each in patches(axis) if each.get_label() != "wall time"}
    tops = {patch.get_label(): patch.get_data().values[0] for patch in patches(axis)}
    assert list(tops) == ["generation", "reward", "reference", "training", "checkpoint", "wall time"], "no critic ran"
    assert tops == pytest.approx(
        {"generation": 2.0, "reward": 2.1, "reference": 2.5, "training": 4.0, "checkpoint": 4.2, "wall time": 3.8}
    )
    assert [float(bottom[0]) for bottom in bottoms.values()] == pytest.approx([0.0, 2.0, 2.1, 2.5, 4.0])


def test_histograms_are_of_the_first_and_last_step() -> None:
    axis = panel_of(overview_figure(a_run(5), title="sums"), "response lengths")
    assert [patch.get_label() for patch in patches(axis)] == ["step 1", "step 5"]
    for patch in patches(axis):
        assert sum(patch.get_data().values) == pytest.approx(100.0)


def test_the_smoothed_line_follows_the_means() -> None:
    steps = a_run(100)
    axis = panel_of(overview_figure(steps, title="sums"), "reward")
    assert values(axis, 0) == [metrics.reward.mean for metrics in steps]
    assert values(axis, 1)[20:80] == pytest.approx([metrics.reward.mean for metrics in steps][20:80])


def test_panels_without_data_are_left_out() -> None:
    steps = [replace(metrics, tokens_per_second=None) for metrics in a_run(9, kl=False)]
    titles = " ".join(axis.get_title(loc="left") for axis in overview_figure(steps, title="sums").axes)
    assert not any(word in titles for word in ("KL", "accepted", "tokens/s", "critic", "explained", "source"))


def test_a_critic_and_several_rewards_get_panels() -> None:
    learnt = {"value_loss": 0.5, "learning": {"critic_grad_norm": 0.4}}
    learnt |= {"reward_components": {"exact": 0.1, "format": 0.9}}
    explained = [-7.0, 0.25, 0.25]
    steps = [replace(a, explained_variance=b, **learnt) for a, b in zip(a_run(3), explained, strict=True)]
    figure = overview_figure(steps, title="sums")
    assert values(panel_of(figure, "critic loss")) == [0.5] * 3
    assert values(panel_of(figure, "gradient norm"), 1) == [0.4] * 3
    sources = panel_of(figure, "rewards by source")
    assert [(line.get_label(), float(line.get_ydata()[0])) for line in sources.lines[:2]] == [  # type: ignore[index, arg-type]
        ("exact", 0.1),
        ("format", 0.9),
    ]
    explained = panel_of(figure, "explained variance")
    assert values(explained) == [-1.0, 0.25, 0.25], "an early value far below hides no other"


def test_the_kl_panel_draws_the_estimator_of_the_job_and_k3() -> None:
    steps = [replace(metrics, kl={"k1": -0.01, "k3": 0.002}) for metrics in a_run(3)]
    lines = panel_of(overview_figure(steps, title="sums"), "KL").lines[:2]
    assert [(line.get_label(), float(line.get_ydata()[0])) for line in lines] == [("k1", -0.01), ("k3", 0.002)]  # type: ignore[index, arg-type]


def test_evaluations_are_drawn_over_the_rewards_with_the_best_marked() -> None:
    runs = [example_evaluation(step=step, reward=reward) for step, reward in ((0, 0.1), (5, 0.9), (10, 0.5))]
    for figure in (
        overview_figure(a_run(10), title="sums", evaluations=runs),
        comparison_figure({"reward A": a_run(10)}, evaluations={"reward A": runs}),
    ):
        axis = panel_of(figure, "reward")
        assert values(axis, 1) == [0.1, 0.9, 0.5]
        assert (values(axis, 2), axis.lines[2].get_label()) == ([0.9], "best: 0.900 after step 5")
        assert axis.get_xlim()[0] < 0, "an evaluation before training is seen"


def test_compared_runs_share_their_scale() -> None:
    figure = comparison_figure({"GRPO": a_run(9), "PPO": a_run(9, kl=False, slope=0.05), "DAPO": a_run(4)})
    assert len(figure.axes) == 6
    grpo, ppo = panel_of(figure, "GRPO"), panel_of(figure, "PPO")
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
    assert struct.unpack(">II", data[16:24]) == (1980, 1100)


def test_letters_that_the_font_lacks_are_no_words_in_the_terminal(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]
) -> None:
    overview(a_run(2), tmp_path / "training.png", title="奖励")
    compare({"奖励": a_run(2), "b": a_run(2)}, tmp_path / "rewards.png")
    assert list(recwarn) == []
    assert capfd.readouterr() == ("", "")


def test_the_same_numbers_give_the_same_bytes(tmp_path: Path) -> None:
    runs = {"A": a_run(4), "B": a_run(5)}
    compare(runs, tmp_path / "a.png")
    compare(runs, tmp_path / "b.png")
    compare({"A": a_run(4), "B": a_run(6)}, tmp_path / "c.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "c.png").read_bytes()


@pytest.mark.parametrize(("num_steps", "first", "last"), [(1, 0.01, 0.01), (19, 0.01, 0.19), (100, 0.03, 0.98)])
def test_ends_returns_means_of_the_first_and_last_tenth(num_steps: int, first: float, last: float) -> None:
    assert ends(a_run(num_steps)) == pytest.approx((first, last))


SAID = "rewards were equal in every group of the last 3 steps: nothing is learnt"


def steps(*equal_groups: int | None) -> list[StepMetrics]:
    return [replace(example_step(step=n), equal_reward_groups=equal) for n, equal in enumerate(equal_groups, 1)]


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
def test_groups_with_equal_rewards_are_counted(groups: str, rewards: list[float], equal: int | None) -> None:
    assert equal_reward_groups(groups, rewards) == equal


@pytest.mark.parametrize(
    ("equal_groups", "warns"),
    [((2, 2, 2), True), ((0, 2, 2, 2), True), ((2, 2), False), ((2, 1, 2), False), ((2, 2, 2, 1), False)],
)
def test_three_steps_of_equal_rewards_give_a_warning(equal_groups: tuple[int, ...], warns: bool) -> None:
    assert warning_of(steps(*equal_groups)).startswith(SAID) is warns
    assert not warning_of(steps(None, None, None))


def test_the_warning_of_equal_rewards_is_in_summary_picture_and_line() -> None:
    progress = RunProgress(example_job(steps=9), lambda: 0.0)
    progress.history(steps(2, 2, 2))
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(panel(progress, console.size, "stop"))
    assert "rewards were equal in every group" in console.export_text()
    assert SAID in step_line(progress.steps[-1], progress)
    assert SAID in dict(facts(progress.steps))["warning"]
    assert "warning" not in dict(facts(steps(2, 2, 1)))


def evaluated(*different: float, expected: float | None = None, num_samples: int = 120) -> list[Evaluation]:
    counts = {"num_samples": num_samples, "expected_answers": expected}
    runs = [replace(example_evaluation(step=10 * place), **counts) for place in range(len(different))]
    return [replace(run, different_answers=number) for run, number in zip(runs, different, strict=True)]


RECORDED = evaluated(88.2, 9.02, expected=16.9)  # of a real run: 58 of 120 answers were `<answer>1</answer>`
COLLAPSES = (
    "the policy collapses: 9.02 effectively different held-out answers after step 10, 88.2 after step 0 "
    "(16.9 are expected)"
)


@pytest.mark.parametrize(
    ("evaluations", "warns"),
    [
        (RECORDED, True),
        (evaluated(60.0, 4.0), True),  # data without answers
        (evaluated(60.0, 16.0, expected=60.0), False),  # more than a quarter is left
        (evaluated(60.0, 4.0, 30.0, expected=60.0), False),  # the last evaluation counts
        (evaluated(60.0, 30.0, 4.0, expected=60.0), True),
        (evaluated(4.0), False),
        (evaluated(60.0, 1.9, expected=2.0), False),  # it learnt to answer yes or no
        (evaluated(60.0, 1.0, expected=2.0), True),  # and to answer yes alone
        (evaluated(19.0, 1.0, expected=19.0, num_samples=19), False),
        (evaluated(20.0, 1.0, expected=20.0, num_samples=20), True),
        ([example_evaluation(step=step) for step in (0, 10)], False),  # of an earlier release
    ],
)
def test_a_policy_with_few_held_out_answers_is_said_to_collapse(evaluations: list[Evaluation], warns: bool) -> None:
    assert collapse_of(evaluations).startswith("the policy collapses: ") is warns
    assert ("warning" in dict(facts(a_run(2), evaluations))) is warns


def test_different_answers_to_different_questions_are_no_collapse() -> None:
    """The figures of examples/smollm2.yaml: 63 different texts among 96 answers to 48 questions."""
    texts = [f"{place}" for place in range(62)] + ["62"] * 34  # as unequal as they can be
    expected = effective_number([f"{place // 2}" for place in range(96)])
    assert expected == pytest.approx(48.0)
    assert effective_number(texts) == pytest.approx(27.5, abs=0.1)
    assert not collapse_of(evaluated(96.0, effective_number(texts), expected=expected, num_samples=96))
    assert collapse_of(evaluated(96.0, effective_number(["1"] * 90 + texts[:6]), expected=expected, num_samples=96))


def test_a_collapse_is_said_in_the_summary_the_picture_and_the_line() -> None:
    progress = RunProgress(example_job(steps=12), lambda: 0.0)
    progress.history(steps := a_run(10), RECORDED)
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(panel(progress, console.size, "stop"))
    assert COLLAPSES[:60] in console.export_text()
    assert COLLAPSES in evaluation_line(RECORDED[1], progress)
    assert COLLAPSES in dict(facts(steps, RECORDED))["warning"]
    assert COLLAPSES in overview_figure(steps, title="sums", evaluations=RECORDED).get_supxlabel()
    assert not overview_figure(steps, title="sums").get_supxlabel()
    for remedy in ("algorithm.klCoefficient", "learning rate", "algorithm.dynamicSampling"):
        assert remedy in warning_of(steps, RECORDED)

"""Signs in steps and evaluations that a run learns nothing or its policy collapses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from rlhfspec.messages.records.evaluations import Evaluation
from rlhfspec.messages.records.metrics import StepMetrics
from rlhfspec.runs.view.text import number

NUM_STEPS = 3  # a sign in one step is chance
DISTINCT = "distinct_per_prompt"  # in StepMetrics.learning: different responses of the step / its prompts
_FEWEST_ANSWERS = 20  # of an evaluation that is judged; of fewer, several are equal by chance
_LEFT_SHARE = 1 / 4  # of the first evaluation's different answers; a policy that only drops wrong forms keeps more
_OF_EXPECTED = 2 / 3  # of the expected answers; with two, equally frequent, one is given to over 92 % of the prompts


def equal_reward_groups(groups: Sequence[Hashable], rewards: Sequence[float]) -> int | None:
    """Return the number of groups whose rewards are all equal, or None if every group has one sample."""
    by_group: defaultdict[Hashable, set[float]] = defaultdict(set)
    for group, reward in zip(groups, rewards, strict=True):
        by_group[group].add(reward)
    return None if len(by_group) == len(rewards) else sum(len(different) == 1 for different in by_group.values())


def warning_of(steps: Sequence[StepMetrics], evaluations: Sequence[Evaluation] = ()) -> str:
    """Return a warning of collapse, else of equal rewards in the last steps, else ""."""
    groups = [(step.equal_reward_groups, step.num_prompts) for step in steps[-NUM_STEPS:]]
    return collapse_of(evaluations) or nothing_learnt(groups)


def nothing_learnt(groups: Sequence[Sequence[float | None]]) -> str:
    """Return a warning if each step, as (groups with equal rewards, all groups), had only equal rewards, else ""."""
    if len(groups) < NUM_STEPS or any(equal is None or equal != num for equal, num in groups):
        return ""
    rewards = f"rewards were equal in every group of the last {NUM_STEPS} steps"
    return f"{rewards}: nothing is learnt. Check the rewards in samples.jsonl"


def collapse_of(evaluations: Sequence[Evaluation]) -> str:
    """Return a warning if held-out responses have lost their variety, else ""."""
    judged = [
        (run.step, run.different_answers, run.expected_answers)
        for run in evaluations
        if run.different_answers and run.num_samples >= _FEWEST_ANSWERS
    ]
    if len(judged) < 2:
        return ""
    (began, before, _), (step, now, expected) = judged[0], judged[-1]
    if now > _LEFT_SHARE * before or (expected is not None and now > _OF_EXPECTED * expected):
        return ""
    told = "" if expected is None else f" ({number(expected)} are expected)"
    return (
        f"the policy collapses: {number(now)} effectively different held-out answers after step {step}, "
        f"{number(before)} after step {began}{told}. "
        "Raise algorithm.klCoefficient, lower the learning rate, or set algorithm.dynamicSampling"
    )

"""Signs that a run learns nothing, or that its policy collapses, in what its steps have recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rlhfspec.messages.records.metrics import StepMetrics

NUM_STEPS = 3  # a sign in one step is chance
DISTINCT = "distinct_per_prompt"  # in StepMetrics.learning: different responses of the step / its prompts
# A policy that answers prompts has at least about one response a prompt; one that has collapsed has one or two in all.
_FEW_RESPONSES = 0.5
_ENTROPY_LEFT = 0.15  # of the first step's: entropy falls in every run, though to a fifth or more while answers differ


def equal_reward_groups(groups: Sequence[Hashable], rewards: Sequence[float]) -> int | None:
    """Return the number of groups with only one distinct reward; None if every group has one sample."""
    by_group: defaultdict[Hashable, set[float]] = defaultdict(set)
    for group, reward in zip(groups, rewards, strict=True):
        by_group[group].add(reward)
    if len(by_group) == len(rewards):
        return None
    return sum(len(different) == 1 for different in by_group.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """Numbers of one step that the warnings are about."""

    entropy: float
    num_prompts: int
    equal_groups: int | None
    distinct: float | None  # different responses / prompts

    @classmethod
    def of(cls, step: StepMetrics) -> Signs:
        return cls(
            entropy=step.entropy,
            num_prompts=step.num_prompts,
            equal_groups=step.equal_reward_groups,
            distinct=step.learning.get(DISTINCT),
        )


def warning_of(steps: Sequence[StepMetrics]) -> str:
    """Return a warning about the last steps, or ""."""
    return warning(*_ends(steps)) if steps else ""


def collapse_of(steps: Sequence[StepMetrics]) -> str:
    """Return the warning that the policy has collapsed in the last steps, or ""."""
    return collapse(*_ends(steps)) if steps else ""


def _ends(steps: Sequence[StepMetrics]) -> tuple[Signs, list[Signs]]:
    return Signs.of(steps[0]), [Signs.of(step) for step in steps[-NUM_STEPS:]]


def warning(first: Signs, recent: Sequence[Signs]) -> str:
    """Return a warning from the first step and the last NUM_STEPS, or ""."""
    if len(recent) < NUM_STEPS:
        return ""
    if collapsed := collapse(first, recent):
        return collapsed
    if any(step.equal_groups != step.num_prompts for step in recent):
        return ""
    rewards = f"rewards were equal in every group of the last {NUM_STEPS} steps"
    return f"{rewards}: nothing is learnt. See what the reward gives, in samples.jsonl"


def collapse(first: Signs, recent: Sequence[Signs]) -> str:
    """Return the warning of a collapsed policy from the first step and the last NUM_STEPS, or ""."""
    if len(recent) < NUM_STEPS or any(step.distinct is None or step.distinct >= _FEW_RESPONSES for step in recent):
        return ""
    if any(step.entropy > _ENTROPY_LEFT * first.entropy for step in recent):
        return ""
    last = recent[-1]
    count = round((last.distinct or 0.0) * last.num_prompts)
    return (
        f"the policy collapses: {count} different responses to {last.num_prompts} prompts, entropy {last.entropy:.2g} "
        f"from {first.entropy:.2g}. Raise algorithm.klCoefficient, lower the learning rate, or look at the reward"
    )

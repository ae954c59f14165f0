"""Samples without a gradient are not run, and the weights are those of a learner that runs them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from learners import learner, rollouts, spec

from rlhfspec.training.learning.learner import Learner, MiniBatch
from rlhfspec.training.learning.rollouts import Rollouts
from rlhfspec.training.modeling.digest import digest


class RunsAll(Learner):
    """Twin that runs the other samples too, in micro-batches of their own, as their zeros are added anywhere."""

    def _mini_batches(self, rollouts: Rollouts, trained: Sequence[int]) -> list[MiniBatch]:
        rest = [sample for sample in range(rollouts.num_samples) if sample not in trained]
        both = zip(super()._mini_batches(rollouts, trained), super()._mini_batches(rollouts, rest), strict=True)
        return [replace(mini, micro_batches=[*mini.micro_batches, *other.micro_batches]) for mini, other in both]


def step(*equal_groups: int, seed: int = 0) -> Rollouts:
    made = rollouts(seed)
    for group in equal_groups:
        made.rewards[made.group_index == group] = 1.0
    return made


def trained(kind: type[Learner], settings: Any, steps: Sequence[Rollouts]) -> tuple[str, list[dict[str, float]]]:
    made = learner(settings)
    made.__class__ = kind
    reports = [made.learn(each) for each in steps]
    return digest(made.policy_state()), [report.metrics for report in reports]


@pytest.mark.parametrize("training", [{}, {"epochs": 2, "miniBatches": 2}])
@pytest.mark.parametrize("equal", [(1,), (0, 1)])
def test_the_weights_are_those_of_running_all(equal: tuple[int, ...], training: dict[str, Any]) -> None:
    settings = spec(algorithm={"klCoefficient": 0.0}, **training)
    steps = [step(), step(*equal, seed=1), step(seed=2)]  # the optimizer's momentum moves weights in the second too
    ours, twins = (trained(kind, settings, steps) for kind in (Learner, RunsAll))
    assert ours[0] == twins[0]
    assert [metrics["skipped_fraction"] for metrics in ours[1]] == [0, 0.5 if len(equal) == 1 else 7 / 8, 0]


def test_a_skipped_sample_is_not_run() -> None:
    made, rows = learner(spec(algorithm={"klCoefficient": 0.0})), list[int]()
    made._policy.base_model.register_forward_pre_hook(
        lambda _module, _args, given: rows.append(given["input_ids"].numel()), with_kwargs=True
    )
    reports = [made.learn(each) for each in (step(), step(1))]
    assert rows[1] < rows[0]
    assert reports[0].has_run.all()
    assert reports[1].has_run.tolist() == [bool(index < 4) for index in range(8) for _ in range(step().lengths[index])]
    fresh = learner(spec(algorithm={"klCoefficient": 0.0})).learn(step(1))
    assert fresh.metrics["log_prob_difference_max"] < 1e-5, "what has not run is not compared"


@pytest.mark.parametrize("algorithm", [{"klCoefficient": 0.1}, {"klCoefficient": 0.0, "entropyCoefficient": 0.1}])
def test_a_kl_or_an_entropy_bonus_gives_every_sample_a_gradient(algorithm: dict[str, float]) -> None:
    """Zero advantages alone do not make the gradient zero: skipping would change the weights."""
    settings = spec(algorithm=algorithm)
    (_, [metrics]), (after, _) = (trained(Learner, settings, [step(0, 1)]), trained(Learner, settings, []))
    assert metrics["skipped_fraction"] == 0
    assert trained(Learner, settings, [step(0, 1)])[0] != after

"""Advantages and losses equal TRL 1.16 and verl 0.9.1 in values and gradients, and obey their laws."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from places import DATA
from torch import Tensor

from rlhfspec.job import Algorithm
from rlhfspec.training.learning.advantages import (
    discounted_sums,
    gae,
    group_advantages,
    informative_groups,
    leave_one_out_advantages,
    overlong_penalties,
    token_rewards,
    whiten,
)
from rlhfspec.training.learning.aggregation import per_token, sample_sums, token_weights
from rlhfspec.training.learning.algorithms import Targets, TokenTerms, policy_terms, value_terms
from rlhfspec.training.learning.losses import (
    clipped_policy_loss,
    kl_estimate,
    sequence_ratio,
    token_ratio,
    truncated_importance_weights,
)
from rlhfspec.training.modeling.log_probs import entropy_of

NUMBERS = json.loads((DATA / "learning_numbers.json").read_text())
MAX_TOKENS = NUMBERS["max_tokens"]
TOLERANCE = {"rtol": 1e-7, "atol": 1e-7}
OF_TRL = {
    "grpo": "sequence-mean-token-mean", "bnpo": "token-mean", "dapo": "token-mean", "dr_grpo": "sequence-sum-constant",
}  # fmt: skip
OF_VERL = {
    "token-mean": "token-mean", "seq-mean-token-mean": "sequence-mean-token-mean",
    "seq-mean-token-sum-norm": "sequence-sum-constant",
}  # fmt: skip
Case = dict[str, Any]


def cases(of: str) -> list[Any]:
    found = [case for case in NUMBERS["cases"] if case["of"] == of]
    assert found, f"no reference numbers of {of}"
    return [pytest.param(case, id=f"{of}-{number}") for number, case in enumerate(found)]


def tensor(case: Case, name: str) -> Tensor:
    return torch.tensor(NUMBERS["batches"][case["batch"]][name], dtype=torch.float64)


def output(case: Case, name: str) -> Tensor:
    return torch.tensor(case["outputs"][name], dtype=torch.float64)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


def targets_of(case: Case, algorithm: Algorithm, advantages: str) -> Targets:
    lengths = tensor(case, "lengths").long()
    given = tensor(case, advantages)
    return Targets(
        lengths=lengths,
        weights=token_weights(lengths, algorithm.loss_aggregation, MAX_TOKENS),
        advantages=per_token(given, lengths) if len(given) == len(lengths) else given,
        generator_log_probs=tensor(case, "generator_log_probs"),
        reference_log_probs=tensor(case, "reference_log_probs") if algorithm.kl_coefficient > 0 else None,
        returns=tensor(case, "returns"),
        old_values=tensor(case, "old_values"),
    )


def policy_loss(case: Case, algorithm: Algorithm, advantages: str) -> tuple[TokenTerms, Tensor]:
    log_probs = tensor(case, "log_probs").requires_grad_()
    targets = targets_of(case, algorithm, advantages)
    terms = policy_terms(algorithm, log_probs, tensor(case, "old_log_probs"), targets, tensor(case, "entropy"))
    terms.loss.backward()
    return terms, log_probs.grad


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("case", cases("trl.loss"))
def test_policy_loss_equals_trl(case: Case) -> None:
    given = case["parameters"]
    algorithm = Algorithm(
        name="grpo", lossAggregation=OF_TRL[given["loss_type"]], ratioLevel=given["level"], clipLow=0.2, clipHigh=0.28,
        klCoefficient=given["beta"], klEstimator="k3", klPlacement="loss", importanceCap=given["cap"],
        entropyCoefficient=given["entropy"],
    )  # fmt: skip
    terms, gradient = policy_loss(case, algorithm, "sample_advantages")
    assert_close(terms.loss.detach(), output(case, "loss"))
    if given["level"] == "sequence" and given["cap"] is not None:  # see docs/algorithms.md
        lengths = tensor(case, "lengths").long()
        assert_close(sample_sums(gradient, lengths), sample_sums(output(case, "gradient"), lengths))
    else:
        assert_close(gradient, output(case, "gradient"))
    num_tokens = len(gradient)
    for side in {"low", "high"} & case["outputs"].keys():
        assert terms.sums[f"clip_fraction_{side}"] / num_tokens == pytest.approx(case["outputs"][side], abs=1e-7)


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("case", cases("verl.vanilla") + cases("verl.gspo"))
def test_policy_loss_equals_verl(case: Case) -> None:
    level = "sequence" if case["of"] == "verl.gspo" else "token"
    algorithm = Algorithm(
        name="grpo", lossAggregation=OF_VERL[case["parameters"]["mode"]], ratioLevel=level, clipLow=0.15, clipHigh=0.25,
        klCoefficient=0.0, importanceCap=case["parameters"]["cap"],
    )  # fmt: skip
    terms, gradient = policy_loss(case, algorithm, "token_advantages")
    assert_close(terms.loss.detach(), output(case, "loss"))
    assert_close(gradient, output(case, "gradient"))
    clipped = terms.sums["clip_fraction_low"] + terms.sums["clip_fraction_high"]
    assert clipped / len(gradient) == pytest.approx(case["outputs"]["clip_fraction"], abs=1e-7)


@pytest.mark.parametrize("case", cases("verl.value"))
def test_value_loss_equals_verl(case: Case) -> None:
    algorithm = Algorithm(
        name="ppo", valueClip=case["parameters"]["clip"], valueCoefficient=0.5,
        lossAggregation=OF_VERL[case["parameters"]["mode"]],
    )  # fmt: skip
    values = tensor(case, "values").requires_grad_()
    terms = value_terms(algorithm, values, targets_of(case, algorithm, "token_advantages"))
    terms.loss.backward()
    assert_close(terms.loss.detach(), output(case, "loss"))
    assert_close(values.grad, output(case, "gradient"))
    clipped = terms.sums["value_clip_fraction"] / len(values)
    assert clipped == pytest.approx(case["outputs"]["clip_fraction"], abs=1e-7)


@pytest.mark.parametrize("case", cases("verl.kl"))
def test_kl_and_its_gradient_equal_verl(case: Case) -> None:
    log_probs = tensor(case, "log_probs").requires_grad_()
    kl = kl_estimate(log_probs, tensor(case, "reference_log_probs"), case["parameters"]["estimator"])
    kl.sum().backward()
    assert_close(kl.detach(), output(case, "kl"))
    assert_close(log_probs.grad, output(case, "gradient"))


def lengths_of(case: Case) -> Tensor:
    return tensor(case, "lengths").long()


def rewards_with_kl(case: Case) -> Tensor:
    kl = kl_estimate(tensor(case, "old_log_probs"), tensor(case, "reference_log_probs"), "k1")
    return token_rewards(tensor(case, "rewards"), lengths_of(case), kl, case["parameters"]["kl_coefficient"])


def groups_of(case: Case) -> tuple[Tensor, Tensor]:
    return tensor(case, "rewards"), tensor(case, "groups").long()


OURS: dict[str, Callable[..., Tensor]] = {
    "verl.importance": lambda case, cap: truncated_importance_weights(
        tensor(case, "old_log_probs"), tensor(case, "generator_log_probs"), cap
    ),
    "verl.aggregate": lambda case, mode: (
        token_weights(lengths_of(case), OF_VERL[mode], MAX_TOKENS) * tensor(case, "values")
    ).sum(),
    "verl.entropy": lambda case, logits: entropy_of(torch.tensor(logits, dtype=torch.float64).log_softmax(-1)),
    "verl.reinforce_plus_plus": lambda case, gamma, **_: whiten(
        discounted_sums(rewards_with_kl(case), lengths_of(case), gamma)
    ),
    "verl.grpo": (grouped := lambda case, **parameters: group_advantages(*groups_of(case), **parameters)),
    "trl.grpo": grouped,
    "verl.rloo": (left_out := lambda case: leave_one_out_advantages(*groups_of(case))),
    "verl.rloo_vectorized": left_out,
    "trl.rloo": lambda case, **_: leave_one_out_advantages(
        sample_sums(rewards_with_kl(case), lengths_of(case)), groups_of(case)[1]
    ),
    "verl.overlong": lambda case, **given: overlong_penalties(lengths_of(case), max_tokens=MAX_TOKENS, **given),
}


@pytest.mark.parametrize("case", [case for of in OURS for case in cases(of)])
def test_numbers_equal_those_of_verl_and_trl(case: Case) -> None:
    [name] = case["outputs"]
    assert_close(OURS[case["of"]](case, **case["parameters"]), output(case, name))


@pytest.mark.parametrize("case", cases("verl.gae"))
def test_gae_equals_verl(case: Case) -> None:
    wanted = {name: case["parameters"][name] for name in ("gamma", "gae_lambda")}
    advantages, returns = gae(rewards_with_kl(case), tensor(case, "old_values"), lengths_of(case), **wanted)
    assert_close(returns, output(case, "returns"))
    assert_close(whiten(advantages), output(case, "advantages"))


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [(1.3, 1.0, 0.0), (0.7, -1.0, 0.0), (1.3, -1.0, 1.0), (0.7, 1.0, -1.0), (1.1, 1.0, -1.0), (0.9, -1.0, 1.0)],
)
def test_the_clip_stops_gradients_only_of_a_policy_too_far(ratio: float, advantage: float, gradient: float) -> None:
    ratios = torch.tensor([ratio], requires_grad=True)
    clipped_policy_loss(ratios, torch.tensor([advantage]), clip_low=0.2, clip_high=0.2).sum().backward()
    assert ratios.grad.tolist() == [gradient]


def test_a_runaway_ratio_with_no_advantage_costs_nothing() -> None:
    ratio = token_ratio(log_probs := torch.tensor([0.0], requires_grad=True), torch.tensor([-1000.0]))
    loss = clipped_policy_loss(ratio, torch.tensor([0.0]), clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    assert loss.item() == 0.0
    assert log_probs.grad.item() == 0.0


def test_on_policy_both_ratios_are_exactly_one() -> None:
    log_probs, lengths = -torch.rand(9), torch.tensor([1, 3, 5])
    assert token_ratio(log_probs, log_probs.clone()).tolist() == [1.0] * 9
    assert sequence_ratio(log_probs, log_probs.clone(), lengths).tolist() == [1.0] * 9


def expected_gradient(estimator: Any, logits: Tensor, reference: Tensor) -> Tensor:
    """Return the estimator's exact mean gradient over tokens of softmax(logits)."""
    leaf = logits.clone().requires_grad_()
    log_probs = torch.log_softmax(leaf, -1)
    (log_probs.detach().exp() * kl_estimate(log_probs, torch.log_softmax(reference, -1), estimator)).sum().backward()
    return leaf.grad


def test_in_the_loss_k2_has_the_gradient_of_the_kl_and_k1_none() -> None:
    logits, reference = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    leaf = logits.clone().requires_grad_()
    log_probs = torch.log_softmax(leaf, -1)
    (log_probs.exp() * (log_probs - torch.log_softmax(reference, -1))).sum().backward()
    assert_close(expected_gradient("k2", logits, reference), leaf.grad)
    assert_close(expected_gradient("k1", logits, reference), torch.zeros_like(leaf.grad))
    near = logits + 1e-4 * reference  # where k3's gradient is right
    ratio = expected_gradient("k3", near, logits).norm() / expected_gradient("k2", near, logits).norm()
    assert ratio.item() == pytest.approx(1.0, abs=1e-3)


def test_k1_and_k3_average_to_the_kl() -> None:
    generator = torch.Generator().manual_seed(4)
    policy, reference = torch.log_softmax(torch.randn(2, 6, dtype=torch.float64, generator=generator), -1)
    exact = (policy.exp() * (policy - reference)).sum()
    for estimator in ("k1", "k3"):
        assert_close((policy.exp() * kl_estimate(policy, reference, estimator)).sum(), exact)


def test_importance_weights_carry_no_gradient() -> None:
    log_probs = torch.tensor([-1.0], requires_grad=True)
    assert not truncated_importance_weights(log_probs, torch.tensor([-2.0]), 2.0).requires_grad


finite = st.floats(-4, 4, allow_nan=False, width=32)
fractions = st.sampled_from([0.0, 0.5, 0.9, 0.95, 1.0])


@st.composite
def ragged(draw: st.DrawFn, num_columns: int) -> tuple[Tensor, list[Tensor]]:
    total = sum(lengths := draw(st.lists(st.integers(1, 6), min_size=1, max_size=5)))
    columns = [draw(st.lists(finite, min_size=total, max_size=total)) for _ in range(num_columns)]
    return torch.tensor(lengths), [torch.tensor(column, dtype=torch.float64) for column in columns]


def slow_gae(rewards: list[float], values: list[float], gamma: float, gae_lambda: float) -> list[float]:
    n = len(rewards)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(n)]
    return [sum((gamma * gae_lambda) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


@settings(max_examples=40, deadline=None)
@given(ragged(2), fractions, fractions)
def test_gae_equals_its_definition(data: tuple[Tensor, list[Tensor]], gamma: float, gae_lambda: float) -> None:
    lengths, (rewards, values) = data
    advantages, returns = gae(rewards, values, lengths, gamma=gamma, gae_lambda=gae_lambda)
    parts = zip(torch.split(rewards, lengths.tolist()), torch.split(values, lengths.tolist()), strict=True)
    slow = [number for r, v in parts for number in slow_gae(r.tolist(), v.tolist(), gamma, gae_lambda)]
    assert_close(advantages, torch.tensor(slow, dtype=torch.float64))
    assert_close(returns, advantages + values)


@settings(max_examples=40, deadline=None)
@given(ragged(2), fractions)
def test_with_lambda_one_gae_is_reward_to_go_less_value(data: tuple[Tensor, list[Tensor]], gamma: float) -> None:
    lengths, (rewards, values) = data
    advantages, returns = gae(rewards, values, lengths, gamma=gamma, gae_lambda=1.0)
    to_go = discounted_sums(rewards, lengths, gamma)
    assert_close(advantages, to_go - values)
    assert_close(returns, to_go)


@settings(max_examples=40, deadline=None)
@given(ragged(1), fractions)
def test_samples_never_reach_into_each_other(data: tuple[Tensor, list[Tensor]], discount: float) -> None:
    lengths, (numbers,) = data
    alone = [discounted_sums(p, torch.tensor([len(p)]), discount) for p in torch.split(numbers, lengths.tolist())]
    assert torch.equal(discounted_sums(numbers, lengths, discount), torch.cat(alone))


@st.composite
def groups(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    rewards = draw(st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, -2.0]), min_size=sum(sizes), max_size=sum(sizes)))
    index = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return torch.tensor(rewards, dtype=torch.float64), index


@settings(max_examples=60, deadline=None)
@given(groups(), st.booleans())
def test_group_advantages_equal_a_slow_loop(data: tuple[Tensor, Tensor], by_std: bool) -> None:
    rewards, index = data
    slow, alone = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for i in range(len(rewards)):
        mine = rewards[index == index[i]]
        others = torch.cat([rewards[:i][index[:i] == index[i]], rewards[i + 1 :][index[i + 1 :] == index[i]]])
        if len(others):
            slow[i] = (rewards[i] - mine.mean()) / (mine.std() + 1e-4 if by_std else 1.0)
            alone[i] = rewards[i] - others.mean()
    assert_close(group_advantages(rewards, index, normalize_by_std=by_std), slow)
    assert_close(leave_one_out_advantages(rewards, index), alone)
    assert informative_groups(rewards, index).tolist() == [
        len(set(rewards[index == index[i]].tolist())) > 1 for i in range(len(rewards))
    ]


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_equal_rewards_have_advantage_exactly_zero(size: int, by_std: bool) -> None:
    rewards, index = torch.full((size,), 0.1, dtype=torch.float64), torch.zeros(size, dtype=torch.int64)
    assert group_advantages(rewards, index, normalize_by_std=by_std).tolist() == [0.0] * size
    assert leave_one_out_advantages(rewards, index).tolist() == [0.0] * size


def test_whitening_gives_mean_zero_and_sample_deviation_one() -> None:
    white = whiten(torch.tensor([3.0, -1.0, 4.0, 1.0, -5.0], dtype=torch.float64))
    assert abs(float(white.mean())) < 1e-12
    assert float(white.std()) == pytest.approx(1.0, abs=1e-8)
    assert whiten(torch.tensor([3.0])).tolist() == [0.0]


def test_the_reward_is_at_the_last_token_and_the_kl_at_every_one() -> None:
    rewards, lengths = torch.tensor([1.0, 2.0]), torch.tensor([1, 3])
    assert token_rewards(rewards, lengths, None, 0.5).tolist() == [1.0, 0.0, 0.0, 2.0]
    kl = torch.tensor([0.5, 1.0, -1.0, 2.0])
    assert token_rewards(rewards, lengths, kl, 0.5).tolist() == [0.75, -0.5, 0.5, 1.0]

"""Advantages equal TRL 1.16 and verl 0.9.1, and satisfy their equations elsewhere."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from places import DATA
from torch import Tensor

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
from rlhfspec.training.learning.aggregation import sample_sums
from rlhfspec.training.learning.losses import kl_estimate

NUMBERS = json.loads((DATA / "learning_numbers.json").read_text())
TOLERANCE = {"rtol": 1e-7, "atol": 1e-7}
Case = dict[str, Any]


def cases(of: str) -> list[Any]:
    found = [case for case in NUMBERS["cases"] if case["of"] == of]
    assert found, f"no reference numbers of {of}"
    return [pytest.param(case, id=f"{of}-{number}") for number, case in enumerate(found)]


def tensor(case: Case, name: str) -> Tensor:
    return torch.tensor(NUMBERS["batches"][case["batch"]][name], dtype=torch.float64)


def lengths_of(case: Case) -> Tensor:
    return tensor(case, "lengths").long()


def output(case: Case, name: str) -> Tensor:
    return torch.tensor(case["outputs"][name], dtype=torch.float64)


def rewards_with_kl(case: Case) -> Tensor:
    kl = kl_estimate(tensor(case, "old_log_probs"), tensor(case, "reference_log_probs"), "k1")
    return token_rewards(tensor(case, "rewards"), lengths_of(case), kl, case["parameters"]["kl_coefficient"])


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize("case", cases("verl.gae"))
def test_gae_equals_verl(case: Case) -> None:
    wanted = {name: case["parameters"][name] for name in ("gamma", "gae_lambda")}
    advantages, returns = gae(rewards_with_kl(case), tensor(case, "old_values"), lengths_of(case), **wanted)
    assert_close(returns, output(case, "returns"))
    assert_close(whiten(advantages), output(case, "advantages"))


@pytest.mark.parametrize("case", cases("verl.reinforce_plus_plus"))
def test_reinforce_plus_plus_equals_verl(case: Case) -> None:
    returns = discounted_sums(rewards_with_kl(case), lengths_of(case), case["parameters"]["gamma"])
    assert_close(whiten(returns), output(case, "advantages"))


@pytest.mark.parametrize("case", cases("verl.grpo") + cases("trl.grpo"))
def test_group_advantages_equal_verl_and_trl(case: Case) -> None:
    ours = group_advantages(tensor(case, "rewards"), tensor(case, "groups").long(), **case["parameters"])
    assert_close(ours, output(case, "advantages"))


@pytest.mark.parametrize("case", cases("verl.rloo") + cases("verl.rloo_vectorized"))
def test_leave_one_out_equals_verl(case: Case) -> None:
    ours = leave_one_out_advantages(tensor(case, "rewards"), tensor(case, "groups").long())
    assert_close(ours, output(case, "advantages"))


@pytest.mark.parametrize("case", cases("trl.rloo"))
def test_leave_one_out_with_kl_in_the_reward_equals_trl(case: Case) -> None:
    totals = sample_sums(rewards_with_kl(case), lengths_of(case))
    assert_close(leave_one_out_advantages(totals, tensor(case, "groups").long()), output(case, "advantages"))


@pytest.mark.parametrize("case", cases("verl.overlong"))
def test_overlong_penalties_equal_verl(case: Case) -> None:
    ours = overlong_penalties(lengths_of(case), max_tokens=NUMBERS["max_tokens"], **case["parameters"])
    assert_close(ours, output(case, "penalties"))


finite = st.floats(-4, 4, allow_nan=False, width=32)
fractions = st.sampled_from([0.0, 0.5, 0.9, 0.95, 1.0])


@st.composite
def ragged(draw: st.DrawFn, num_columns: int) -> tuple[Tensor, list[Tensor]]:
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    total = sum(lengths)
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
    alone = [
        discounted_sums(part, torch.tensor([len(part)]), discount) for part in torch.split(numbers, lengths.tolist())
    ]
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


def test_the_overlong_penalty_is_a_ramp_down_to_the_whole_penalty() -> None:
    penalties = overlong_penalties(torch.tensor([1, 6, 7, 8, 10]), max_tokens=10, buffer=4, penalty=2.0)
    assert penalties.tolist() == [0.0, 0.0, -0.5, -1.0, -2.0]

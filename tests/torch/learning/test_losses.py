"""Losses equal TRL 1.16 and verl 0.9.1 in values and gradients, and obey their laws."""

import json
from typing import Any

import pytest
import torch
from places import DATA
from torch import Tensor

from rlhfspec.job import Algorithm
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
    assert log_probs.grad is not None
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
    if given["level"] == "sequence" and given["cap"] is not None:  # see docs/algorithms/gspo.md
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
    assert values.grad is not None
    assert_close(terms.loss.detach(), output(case, "loss"))
    assert_close(values.grad, output(case, "gradient"))
    clipped = terms.sums["value_clip_fraction"] / len(values)
    assert clipped == pytest.approx(case["outputs"]["clip_fraction"], abs=1e-7)


@pytest.mark.parametrize("case", cases("verl.kl"))
def test_kl_and_its_gradient_equal_verl(case: Case) -> None:
    log_probs = tensor(case, "log_probs").requires_grad_()
    kl = kl_estimate(log_probs, tensor(case, "reference_log_probs"), case["parameters"]["estimator"])
    kl.sum().backward()
    assert log_probs.grad is not None
    assert_close(kl.detach(), output(case, "kl"))
    assert_close(log_probs.grad, output(case, "gradient"))


@pytest.mark.parametrize("case", cases("verl.importance"))
def test_importance_weights_equal_verl(case: Case) -> None:
    cap = case["parameters"]["cap"]
    weights = truncated_importance_weights(tensor(case, "old_log_probs"), tensor(case, "generator_log_probs"), cap)
    assert_close(weights, output(case, "weights"))


@pytest.mark.parametrize("case", cases("verl.aggregate"))
def test_aggregation_equals_verl(case: Case) -> None:
    weights = token_weights(tensor(case, "lengths").long(), OF_VERL[case["parameters"]["mode"]], MAX_TOKENS)
    assert_close((weights * tensor(case, "values")).sum(), output(case, "loss"))


@pytest.mark.parametrize("case", cases("verl.entropy"))
def test_entropy_equals_verl(case: Case) -> None:
    logits = torch.tensor(case["parameters"]["logits"], dtype=torch.float64)
    assert_close(entropy_of(logits), output(case, "entropy"))


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [(1.3, 1.0, 0.0), (0.7, -1.0, 0.0), (1.3, -1.0, 1.0), (0.7, 1.0, -1.0), (1.1, 1.0, -1.0), (0.9, -1.0, 1.0)],
)
def test_the_clip_stops_the_gradient_only_where_the_policy_went_too_far(
    ratio: float, advantage: float, gradient: float
) -> None:
    ratios = torch.tensor([ratio], requires_grad=True)
    clipped_policy_loss(ratios, torch.tensor([advantage]), clip_low=0.2, clip_high=0.2).sum().backward()
    assert ratios.grad is not None
    assert ratios.grad.tolist() == [gradient]


def test_a_runaway_ratio_with_no_advantage_costs_nothing() -> None:
    log_probs = torch.tensor([0.0], requires_grad=True)
    ratio = token_ratio(log_probs, torch.tensor([-1000.0]))
    loss = clipped_policy_loss(ratio, torch.tensor([0.0]), clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    assert loss.item() == 0.0
    assert log_probs.grad is not None
    assert log_probs.grad.item() == 0.0


def test_on_policy_both_ratios_are_exactly_one() -> None:
    log_probs, lengths = -torch.rand(9), torch.tensor([1, 3, 5])
    assert token_ratio(log_probs, log_probs.clone()).tolist() == [1.0] * 9
    assert sequence_ratio(log_probs, log_probs.clone(), lengths).tolist() == [1.0] * 9


def test_the_sequence_ratio_is_the_geometric_mean_of_token_ratios() -> None:
    log_probs = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64)
    old = torch.tensor([-1.2, -0.9, -2.0], dtype=torch.float64)
    wanted = [((0.2 + 0.4) / 2), ((0.2 + 0.4) / 2), 0.0]
    assert_close(sequence_ratio(log_probs, old, torch.tensor([2, 1])), torch.tensor(wanted, dtype=torch.float64).exp())


def expected_gradient(estimator: Any, logits: Tensor, reference: Tensor) -> Tensor:
    """Return the estimator's exact mean gradient over tokens of softmax(logits)."""
    leaf = logits.clone().requires_grad_()
    log_probs = torch.log_softmax(leaf, -1)
    (log_probs.detach().exp() * kl_estimate(log_probs, torch.log_softmax(reference, -1), estimator)).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def test_in_the_loss_k2_has_the_gradient_of_the_kl_and_k1_none() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, reference = torch.randn(2, 6, dtype=torch.float64, generator=generator)
    leaf = logits.clone().requires_grad_()
    log_probs = torch.log_softmax(leaf, -1)
    (log_probs.exp() * (log_probs - torch.log_softmax(reference, -1))).sum().backward()
    assert leaf.grad is not None
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


@pytest.mark.parametrize("aggregation", sorted(OF_VERL.values()))
def test_weights_are_sums_over_samples_of_their_own(aggregation: Any) -> None:
    lengths = torch.tensor([1, 4, 2])
    weights = token_weights(lengths, aggregation, 8)
    wanted = {
        "token-mean": [1 / 7, 4 / 7, 2 / 7], "sequence-mean-token-mean": [1 / 3] * 3,
        "sequence-sum-constant": [1 / 24, 4 / 24, 2 / 24],
    }  # fmt: skip
    assert_close(sample_sums(weights, lengths), torch.tensor(wanted[aggregation], dtype=torch.float64))


def test_importance_weights_carry_no_gradient() -> None:
    log_probs = torch.tensor([-1.0], requires_grad=True)
    assert not truncated_importance_weights(log_probs, torch.tensor([-2.0]), 2.0).requires_grad

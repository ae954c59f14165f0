"""Every algorithm's targets and losses equal its reference in any order and split."""

import json
import math
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from example_records import example_sample
from hypothesis import given, settings, strategies as st
from learners import ALGORITHMS
from places import DATA, ROOT
from torch import Tensor

from rlhfspec.errors import RolloutError
from rlhfspec.job import Algorithm
from rlhfspec.messages.loop import scoring_stages
from rlhfspec.messages.records import Sample, Score, ScoringStage
from rlhfspec.training.learning.algorithms import (
    Targets,
    TokenTerms,
    metrics_before_updates,
    needs_policy_log_probs,
    policy_terms,
    prepare,
    value_terms,
)
from rlhfspec.training.learning.rollouts import Rollouts

NUMBERS = json.loads((DATA / "learning_numbers.json").read_text())
MAX_TOKENS = NUMBERS["max_tokens"]
Records = tuple[list[Sample], list[Score]]


def sample_of(prompt: int, replica: int, token_ids: list[int], log_probs: list[float], **changes: Any) -> Sample:
    tokens = {"token_ids": tuple(token_ids), "tempered_log_probs": tuple(log_probs), "prompt_token_ids": (prompt, 7)}
    return example_sample(prompt, replica, step=2, log_probs=[x - 1 for x in log_probs], **tokens | changes)


def score_of(sample: Sample, stage: ScoringStage, values: list[float], **changes: Any) -> Score:
    place: Any = {"id": f"{sample.id}/{stage}", "sample_id": sample.id, "job": "sums", "step": 2, "stage": stage}
    return Score(values=tuple(values), **place | changes)


def records_of(number: int) -> Records:
    batch = NUMBERS["batches"][number]
    samples, scores, start = [], [], 0
    for i, length in enumerate(batch["lengths"]):
        tokens = slice(start, start := start + length)
        replica = batch["groups"][:i].count(batch["groups"][i])
        log_probs = batch["generator_log_probs"][tokens]
        sample = sample_of(batch["groups"][i] * 5, replica, list(range(i, i + length)), log_probs)
        samples.append(sample)
        scores.append(score_of(sample, "reward", [batch["rewards"][i]], components=(("exact", float(i)),)))
        scores.append(score_of(sample, "reference", batch["reference_log_probs"][tokens]))
        scores.append(score_of(sample, "critic", batch["old_values"][tokens]))
    shuffle = random.Random(number).shuffle
    shuffle(samples)
    shuffle(scores)
    return samples, scores


def flat(number: int, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(NUMBERS["batches"][number][name], dtype=dtype)


def targets_of(number: int, algorithm: Algorithm) -> Targets:
    rollouts = Rollouts.of(*records_of(number))
    return prepare(algorithm, rollouts, policy_log_probs=flat(number, "old_log_probs"), max_tokens=MAX_TOKENS)[0]


def find(of: str, number: int, **parameters: Any) -> dict[str, Any]:
    (case,) = [
        case for case in NUMBERS["cases"]
        if case["of"] == of and case["batch"] == number and parameters.items() <= case["parameters"].items()
    ]  # fmt: skip
    return case["outputs"]  # type: ignore[no-any-return]


PIPELINES = [
    (
        "ppo",
        {"klCoefficient": 0.1, "gamma": 0.97, "gaeLambda": 0.9},
        "verl.gae",
        {"kl_coefficient": 0.1, "gamma": 0.97},
    ),
    ("reinforce++", {"klCoefficient": 0.1, "gamma": 0.97}, "verl.reinforce_plus_plus", {"gamma": 0.97}),
    ("grpo", {}, "trl.grpo", {"normalize_by_std": True}),
    ("dapo", {}, "trl.grpo", {"normalize_by_std": True}),
    ("gspo", {}, "trl.grpo", {"normalize_by_std": True}),
    ("dr-grpo", {}, "trl.grpo", {"normalize_by_std": False}),
    ("rloo", {}, "trl.rloo", {"kl_coefficient": 0.05}),
]


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize(("name", "fields", "of", "parameters"), PIPELINES, ids=[case[0] for case in PIPELINES])
def test_each_algorithm_by_name_has_its_reference_s_advantages(
    number: int, name: str, fields: dict[str, Any], of: str, parameters: dict[str, Any]
) -> None:
    targets = targets_of(number, Algorithm.model_validate({"name": name} | fields))
    wanted = torch.tensor(find(of, number, **parameters)["advantages"])
    if len(wanted) == len(targets.lengths):
        wanted = torch.repeat_interleave(wanted, targets.lengths)
    torch.testing.assert_close(targets.advantages, wanted, rtol=1e-5, atol=1e-6)
    if name == "ppo":
        returns = torch.tensor(find(of, number, **parameters)["returns"])
        torch.testing.assert_close(targets.returns, returns, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_order_of_arrival_does_not_change_advantages(name: str) -> None:
    algorithm = Algorithm.model_validate({"name": name})
    samples, scores = records_of(2)
    one = Rollouts.of(samples, scores)
    other = Rollouts.of(samples[::-1], sorted(scores, key=lambda score: score.id))
    old = flat(2, "old_log_probs")
    first, first_metrics = prepare(algorithm, one, policy_log_probs=old, max_tokens=MAX_TOKENS)
    second, second_metrics = prepare(algorithm, other, policy_log_probs=old, max_tokens=MAX_TOKENS)
    assert one.ids == other.ids
    assert torch.equal(first.advantages, second.advantages)
    assert first_metrics == second_metrics


def split_terms(algorithm: Algorithm, targets: Targets, parts: list[list[int]], number: int) -> tuple[Any, ...]:
    log_probs = flat(number, "log_probs", torch.float64).requires_grad_()
    values = flat(number, "values", torch.float64).requires_grad_()
    starts = (targets.lengths.cumsum(0) - targets.lengths).tolist()
    old, entropy = flat(number, "old_log_probs", torch.float64), flat(number, "entropy", torch.float64)
    loss, found = torch.zeros((), dtype=torch.float64), []
    for part in parts:
        tokens = torch.cat([torch.arange(starts[i], starts[i] + int(targets.lengths[i])) for i in part])
        micro = targets.select(part)
        found.append(policy_terms(algorithm, log_probs[tokens], old[tokens], micro, entropy[tokens]))
        if algorithm.name == "ppo":
            found.append(value_terms(algorithm, values[tokens], micro))
    for terms in found:
        terms.loss.backward(retain_graph=True)
        loss = loss + terms.loss.detach()
    return loss, added(found, "losses"), added(found, "sums"), log_probs.grad, values.grad


def added(found: list[TokenTerms], kind: str) -> dict[str, float]:
    totals: dict[str, float] = {}
    for terms in found:
        for name, number in getattr(terms, kind).items():
            totals[name] = totals.get(name, 0.0) + number
    return totals


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(ALGORITHMS), st.integers(0, 3), st.randoms(use_true_random=False))
def test_micro_batches_add_up_to_the_mini_batch(name: str, number: int, rng: random.Random) -> None:
    algorithm = Algorithm.model_validate({"name": name, "importanceCap": 1.3, "entropyCoefficient": 0.01})
    targets = targets_of(number, algorithm)
    order = list(range(len(targets.lengths)))
    whole = split_terms(algorithm, targets, [order[:]], number)
    rng.shuffle(order)
    cut = rng.randint(1, len(order))
    parts = split_terms(algorithm, targets, [part for part in (order[:cut], order[cut:]) if part], number)
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-10, atol=1e-12)
    assert parts[1] == pytest.approx(whole[1], abs=1e-10)
    assert parts[2] == pytest.approx(whole[2], abs=1e-10)
    torch.testing.assert_close(parts[3], whole[3], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(parts[4], whole[4], rtol=1e-10, atol=1e-12)


def test_a_mini_batch_counts_its_weights_anew() -> None:
    algorithm = Algorithm(name="grpo")
    targets = targets_of(2, algorithm)
    mini = targets.mini_batch(algorithm, [1, 3, 4], max_tokens=MAX_TOKENS)
    assert float(mini.weights.sum()) == pytest.approx(1.0)
    assert mini.lengths.tolist() == targets.lengths[[1, 3, 4]].tolist()
    assert torch.equal(mini.advantages, targets.select([1, 3, 4]).advantages)
    assert float(targets.select([1, 3, 4]).weights.sum()) == pytest.approx(3 / len(targets.lengths))


def test_on_policy_the_gradient_is_the_plain_policy_gradient() -> None:
    algorithm = Algorithm(name="dapo", klCoefficient=0.0)
    targets = targets_of(1, algorithm)
    log_probs = flat(1, "old_log_probs").requires_grad_()
    policy_terms(algorithm, log_probs, log_probs.detach(), targets, None).loss.backward()
    torch.testing.assert_close(log_probs.grad, -targets.advantages * targets.weights)


def test_the_kl_counts_in_the_loss_or_in_the_reward() -> None:
    log_probs = flat(1, "log_probs")
    for placement, in_loss in (("loss", True), ("reward", False)):
        algorithm = Algorithm.model_validate({"name": "grpo", "klCoefficient": 0.1, "klPlacement": placement})
        terms = policy_terms(algorithm, log_probs, log_probs, targets_of(1, algorithm), None)
        assert ("kl_loss" in terms.losses) == in_loss
        assert needs_policy_log_probs(algorithm) != in_loss


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_is_told_by_the_jobs_estimator_and_by_k3(estimator: str) -> None:
    """k1 is negative where the policy gives samples less than the reference does; k3 never is."""
    algorithm = Algorithm.model_validate({"name": "grpo", "klEstimator": estimator})
    rollouts = Rollouts.of(*records_of(0))
    everything = torch.ones_like(rollouts.reference_log_probs, dtype=torch.bool)
    entropy = torch.ones(len(everything))
    told = metrics_before_updates(algorithm, rollouts, rollouts.reference_log_probs - 0.5, entropy, everything)
    expected = {"k1": -0.5, "k2": 0.125, "k3": math.exp(0.5) - 1.5}
    assert told == pytest.approx({"entropy": 1.0} | {f"kl_{name}": expected[name] for name in {estimator, "k3"}})
    nearly = rollouts.reference_log_probs.double() + 1e-9
    before = metrics_before_updates(algorithm, rollouts, nearly, entropy, everything)
    assert before["kl_k3"] >= 0, "rounding aside"


def test_without_a_coefficient_no_reference_is_needed_nor_used() -> None:
    algorithm = Algorithm(name="dapo")
    samples, scores = records_of(0)
    rollouts = Rollouts.of(samples, [score for score in scores if score.stage == "reward"])
    targets, metrics = prepare(algorithm, rollouts, policy_log_probs=None, max_tokens=MAX_TOKENS)
    log_probs = flat(0, "log_probs")
    assert policy_terms(algorithm, log_probs, log_probs, targets, None).losses.keys() == {"policy_loss"}
    has_run = torch.tensor([True, True, False])
    before = metrics_before_updates(algorithm, rollouts, log_probs, torch.tensor([1.0, 2.0, 9.0]), has_run)
    assert before == {"entropy": 1.5}
    assert metrics["reward_source_exact"] == 1.5


@pytest.mark.parametrize(("name", "stage"), [("grpo", "reference"), ("ppo", "critic")])
def test_a_stage_that_never_scored_is_named(name: str, stage: str) -> None:
    algorithm = Algorithm.model_validate({"name": name})
    assert stage in scoring_stages(algorithm)
    samples, scores = records_of(0)
    rollouts = Rollouts.of(samples, [score for score in scores if score.stage != stage])
    with pytest.raises(RolloutError, match=f"has no {stage} score"):
        prepare(algorithm, rollouts, policy_log_probs=flat(0, "old_log_probs"), max_tokens=MAX_TOKENS)


def test_the_overlong_penalty_reaches_the_advantages_but_not_the_choice_of_groups() -> None:
    samples = [sample_of(0, 0, [1] * 4, [-1.0] * 4), sample_of(0, 1, [1] * 10, [-1.0] * 10)]
    rollouts = Rollouts.of(samples, [score_of(sample, "reward", [1.0]) for sample in samples])
    algorithm = Algorithm(name="dapo", overlongBuffer=4, overlongPenalty=0.5)
    targets, metrics = prepare(algorithm, rollouts, policy_log_probs=None, max_tokens=10)
    assert targets.advantages[0] > 0 > targets.advantages[-1]
    assert metrics["overlong_penalty_mean"] == -0.25
    assert metrics["informative_fraction"] == 0.0


def test_rollouts_are_in_id_order_with_tokens_behind_each_other() -> None:
    samples = [
        sample_of(10, 0, [9], [-3.0], finish_reason="length"), sample_of(2, 1, [4, 5], [-1.0, -2.0]),
        sample_of(2, 0, [6], [-4.0]),
    ]  # fmt: skip
    rollouts = Rollouts.of(samples, [score_of(sample, "reward", [float(sample.prompt)]) for sample in samples])
    assert rollouts.ids == ("sums/2/2/0", "sums/2/2/1", "sums/2/10/0")  # numbers, not letters, are sorted
    assert rollouts.group_index.tolist() == [0, 0, 1]
    assert rollouts.token_ids.tolist() == [6, 4, 5, 9]
    assert rollouts.generator_log_probs.tolist() == [-4.0, -1.0, -2.0, -3.0]
    assert rollouts.log_probs.tolist() == [-5.0, -2.0, -3.0, -4.0]
    assert rollouts.rewards.tolist() == [2.0, 2.0, 10.0]
    assert rollouts.truncated.tolist() == [False, False, True]
    assert rollouts.prompt_token_ids == ((2, 7), (2, 7), (10, 7))
    assert rollouts.reference_log_probs is None


ONE, TWO = BOTH = [sample_of(0, 0, [1, 2], [-1.0, -1.0]), sample_of(0, 1, [3], [-1.0])]
GOOD, OTHER = (score_of(sample, "reward", [1.0]) for sample in (ONE, TWO))
REFERENCE = score_of(ONE, "reference", [-1.0, -1.0])
BROKEN: dict[str, Records] = {  # what is said of the second sample, and a step of which it is true
    "has no reward score": (BOTH, [GOOD]),
    "has two reward scores": (BOTH, [GOOD, OTHER, OTHER]),
    "is there twice": ([ONE, TWO, TWO], [GOOD, OTHER]),
    "has a reward score but is not in the step": ([ONE], [GOOD, OTHER]),
    "has no reference score": (BOTH, [GOOD, OTHER, REFERENCE]),
    "has a reference score of 0 values, not 1": (BOTH, [GOOD, OTHER, REFERENCE, score_of(TWO, "reference", [])]),
    "could not be scored by reward (timeout)": (BOTH, [GOOD, replace(OTHER, error="timeout")]),
    "has a reward score that is not finite": (BOTH, [GOOD, replace(OTHER, values=(math.nan,))]),
    "has reward components ['style'], others have []": (BOTH, [GOOD, replace(OTHER, components=(("style", 1.0),))]),
    "was not generated (lost)": ([ONE, replace(TWO, finish_reason="error", error="lost")], [GOOD, OTHER]),
    "has no response tokens": ([ONE, replace(TWO, token_ids=())], [GOOD, OTHER]),
    "has 0 log_probs for 1 tokens": ([ONE, replace(TWO, log_probs=())], [GOOD, OTHER]),
    "has tempered_log_probs that are not finite": ([ONE, replace(TWO, tempered_log_probs=(-math.inf,))], [GOOD, OTHER]),
}  # fmt: skip


@pytest.mark.parametrize("message", BROKEN)
def test_a_step_that_is_not_whole_names_the_sample(message: str) -> None:
    with pytest.raises(RolloutError, match=f"^sample sums/2/0/1: {re.escape(message)}$"):
        Rollouts.of(*BROKEN[message])


def test_approximate_kl_is_measured_from_the_old_policy() -> None:
    algorithm = Algorithm(name="dapo")
    log_probs, old = flat(1, "log_probs"), flat(1, "old_log_probs")
    terms = policy_terms(algorithm, log_probs, old, targets_of(1, algorithm), None)
    log_ratio = (log_probs - old).double()
    assert terms.sums["approximate_kl"] == pytest.approx(float((log_ratio.exp() - 1 - log_ratio).sum()), rel=1e-5)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_section_of_an_algorithm_shows_its_defaults(name: str) -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    sections = {title: text for title, _, text in (part.partition("\n") for part in page.split("\n## "))}
    shown = yaml.safe_load(sections[name].split("```yaml\n")[1].split("```")[0])["algorithm"]
    assert shown["name"] == name
    assert shown.keys() >= {"name", "samplesPerPrompt", "clipLow", "clipHigh", "lossAggregation", "klCoefficient"}
    resolved = Algorithm.model_validate({"name": name}).model_dump(by_alias=True)
    assert shown == {field: resolved[field] for field in shown}

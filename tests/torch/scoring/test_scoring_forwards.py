"""Reference log-probs and critic values are right, and pure functions of the sample."""

import copy
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from on_device import BY_COMPANY
from scorers import CONTEXT, make_scorer, row_sensitive_scorer

from rlhfspec.errors import InvalidRequest, NumericalError, WeightsVersionError
from rlhfspec.kernels.cpu import build
from rlhfspec.tiny import MODEL_KINDS, random_model
from rlhfspec.training.modeling.critic import Critic
from rlhfspec.training.modeling.exact import ExactForward
from rlhfspec.training.modeling.loading import prepared
from rlhfspec.training.modeling.log_probs import TorchForward
from rlhfspec.training.modeling.packed import pack_sequences
from rlhfspec.training.scoring.log_probs import LogProbScorer, log_probs_reference
from rlhfspec.training.scoring.values import ValueScorer

needs_kernels = pytest.mark.skipif(build.load() is None, reason=f"needs the CPU kernels: {build.unavailable_reason()}")
_DRAW = np.random.default_rng(0)
SAMPLES = [
    (_DRAW.integers(3, 90, prompt).tolist(), _DRAW.integers(3, 90, response).tolist())
    for prompt, response in [(1, 1), (1, 40), (31, 2), (33, 33), (5, 16), (60, 60)]
]


def make_critic(kind: str, seed: int = 1) -> Critic:
    return moved(Critic(prepared(random_model(kind, seed=2))), seed)


def moved(critic: Critic, seed: int) -> Critic:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return critic


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_log_probs_are_hugging_faces(kind: str) -> None:
    scorer, model = make_scorer(kind), random_model(kind, seed=2)
    for prompt, response in SAMPLES:
        expected = log_probs_reference(model, prompt, response, 0.7)
        np.testing.assert_allclose(scorer.log_probs(prompt, response), expected, atol=2e-5, rtol=1e-6)


@functools.cache
def scored_once(kind: str, dtype: str) -> tuple[Any, list[list[float]]]:
    scorer = make_scorer(kind, dtype=dtype)
    return scorer, [scorer.log_probs(*sample) for sample in SAMPLES]


@functools.cache
def valued_once(kind: str, _dtype: str) -> tuple[Any, list[list[float]]]:
    scorer = ValueScorer(make_critic(kind), max_context=CONTEXT)
    return scorer, [scorer.values(*sample) for sample in SAMPLES]


@needs_kernels
@pytest.mark.on_the_cpu(BY_COMPANY)
@pytest.mark.parametrize(
    ("once", "score", "kind"),
    [
        *((scored_once, LogProbScorer.log_probs, kind) for kind in ("llama", "gemma2", "gpt-neox")),
        (valued_once, ValueScorer.values, "qwen3"),
    ],
)
@settings(max_examples=12)
@given(
    order=st.lists(st.integers(0, len(SAMPLES) - 1), min_size=1, max_size=8),
    chunk=st.integers(1, 130),
    num_threads=st.sampled_from([1, 2]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_the_score_of_a_sample_does_not_depend_on_others(
    once: Any, score: Any, kind: str, order: list[int], chunk: int, num_threads: int, dtype: str
) -> None:
    """History, chunk sizes and thread counts do not matter."""
    scorer, expected = once(kind, dtype)
    whole = scorer._rows._chunk_tokens
    build.set_num_threads(num_threads)
    scorer._rows._chunk_tokens = chunk
    try:
        for place in order:
            assert score(scorer, *SAMPLES[place]) == expected[place]
    finally:
        scorer._rows._chunk_tokens = whole
        build.set_num_threads(None)


@needs_kernels
@pytest.mark.on_the_cpu(BY_COMPANY)
def test_workers_and_threads_at_once_give_the_same_scores() -> None:
    scorers, (_, expected) = [make_scorer(), make_scorer()], scored_once("llama", "float32")
    calls = [(scorers[number % 2], number % len(SAMPLES)) for number in range(48)]
    build.set_num_threads(2)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda call: call[0].log_probs(*SAMPLES[call[1]]), calls))
    finally:
        build.set_num_threads(None)
    assert found == [expected[place] for _, place in calls]


@pytest.mark.on_the_cpu("forwards of one shape leave no neighbours to depend on")
def test_a_score_that_depends_on_its_neighbours_would_be_noticed() -> None:
    scorer = row_sensitive_scorer(CONTEXT)
    whole = scorer.log_probs(*SAMPLES[-1])
    scorer._rows._chunk_tokens = 3
    parts = scorer.log_probs(*SAMPLES[-1])
    np.testing.assert_allclose(whole, parts, atol=1e-4)
    assert whole != parts


@needs_kernels
@pytest.mark.on_the_cpu(BY_COMPANY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference_log_probs_equal_those_of_the_exact_trainer(dtype: str) -> None:
    """The KL of an exactly on-policy job starts at exactly 0."""
    forward = ExactForward(prepared(random_model("llama", seed=2)), 0.7, max_context=CONTEXT, dtype=dtype)
    scorer = make_scorer(dtype=dtype)
    with torch.no_grad():
        ours = forward(pack_sequences(*zip(*SAMPLES, strict=True))).log_probs.tolist()
    assert ours == [number for sample in SAMPLES for number in scorer.log_probs(*sample)]


def test_the_reference_begins_with_nearly_the_plain_trainers_numbers() -> None:
    forward = TorchForward(prepared(random_model("llama", seed=2)), 0.7)
    scorer = make_scorer()
    with torch.no_grad():
        theirs = forward(pack_sequences(*zip(*SAMPLES, strict=True))).log_probs.double()
    ours = torch.tensor([number for sample in SAMPLES for number in scorer.log_probs(*sample)], dtype=torch.float64)
    difference = ours - theirs
    assert (difference.abs() / theirs.abs().clamp_min(1)).max() < 5e-6
    assert (difference.expm1() - difference).abs().max() < 1e-9  # what the k3 estimator makes of it


@needs_kernels
@pytest.mark.on_the_cpu(BY_COMPANY)
def test_a_large_vocabulary_is_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfspec.training.scoring.log_probs._LOGITS_AT_A_TIME", 97 * 7)
    scorer, (_, expected) = make_scorer(), scored_once("llama", "float32")
    assert scorer._rows._chunk_tokens == 7
    assert [scorer.log_probs(*sample) for sample in SAMPLES] == expected


@pytest.mark.parametrize(
    ("prompt", "response", "problem"),
    [
        ([], [1], "must not be empty"),
        ([1], [], "must not be empty"),
        ([1] * 100, [1] * 30, "must fit into 128 tokens"),
        ([1, 97], [1], r"must be in \[0, 97\)"),
        ([1], [-1, 3], r"must be in \[0, 97\)"),
        ([1], [5, 97], r"must be in \[0, 97\)"),
        ([1], [5, -2], r"must be in \[0, 97\)"),
    ],
)
def test_impossible_samples_are_refused(prompt: list[int], response: list[int], problem: str) -> None:
    scorer, _ = scored_once("llama", "float32")
    with pytest.raises(InvalidRequest, match=problem):
        scorer.log_probs(prompt, response)


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_context: must be <= the model's 512 positions"):
        LogProbScorer(random_model("llama", seed=0), temperature=1.0, max_context=513)


def test_a_log_prob_of_nan_is_named_with_its_position() -> None:
    model = random_model("llama", seed=2)
    model.model.embed_tokens.weight.data[42] = torch.nan
    scorer = LogProbScorer(model, temperature=1.0, max_context=CONTEXT)
    with pytest.raises(NumericalError, match="reference log-prob: nan at response token 2"):
        scorer.log_probs([5, 6], [7, 42, 8, 9])
    assert len(scorer.log_probs([5, 6], [7, 8])) == 2  # the next sample does not suffer from it


@torch.inference_mode()
def values_reference(critic: Critic, prompt: list[int], response: list[int]) -> list[float]:
    """Compute the values with the trainer's critic, one sequence a forward."""
    return critic(pack_sequences([prompt], [response])).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_values_are_the_trainers_critics(kind: str) -> None:
    scorer = ValueScorer(critic := make_critic(kind), max_context=CONTEXT)
    for prompt, response in SAMPLES:
        expected = values_reference(critic, prompt, response)
        assert max(map(abs, expected)) > 1e-3
        np.testing.assert_allclose(scorer.values(prompt, response), expected, atol=2e-6, rtol=1e-5)


def test_new_weights_give_the_values_of_a_new_scorer() -> None:
    old, new = make_critic("qwen2"), moved(make_critic("qwen2"), seed=9)
    scorer = ValueScorer(old, max_context=CONTEXT, version=2)
    before = scorer.values(*SAMPLES[3])
    scorer.load_weights(new.state_dict(), 3)
    after = scorer.values(*SAMPLES[3])
    assert scorer.version == 3
    assert after != before
    assert after == ValueScorer(new, max_context=CONTEXT).values(*SAMPLES[3])
    with pytest.raises(WeightsVersionError, match="wanted 2, have 3"):
        scorer.load_weights(old.state_dict(), 2)


def test_a_value_scorer_does_not_change_the_critic() -> None:
    critic = make_critic("llama")
    before = copy.deepcopy(critic.state_dict())
    expected = values_reference(critic, *SAMPLES[2])
    ValueScorer(critic, max_context=CONTEXT)
    assert values_reference(critic, *SAMPLES[2]) == expected
    assert all(torch.equal(before[name], tensor) for name, tensor in critic.state_dict().items())

"""Reference and critic on a device batch waiting samples, each with its own bits."""

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scorers import CONTEXT, make_scorer
from transformers import MixtralConfig, MixtralForCausalLM

from rlhfspec.engine.forward import constant_shape
from rlhfspec.errors import InvalidRequest, NumericalError
from rlhfspec.huggingface.proof.check import BITS_BY_COMPANY, OWN_BITS
from rlhfspec.tiny import random_model
from rlhfspec.training.modeling.critic import Critic
from rlhfspec.training.modeling.loading import prepared
from rlhfspec.training.scoring import log_probs
from rlhfspec.training.scoring.kept_prompts import KeptPrompts
from rlhfspec.training.scoring.log_probs import LogProbScorer, Pair
from rlhfspec.training.scoring.values import ValueScorer

DEVICE = "second:1"
_DRAW = np.random.default_rng(0)
PROMPTS = [_DRAW.integers(3, 90, size).tolist() for size in (80, 3, 80, 66)]  # three are kept
PAIRS: list[Pair] = [(prompt, _DRAW.integers(3, 90, 1 + 5 * n).tolist()) for n in range(3) for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def _small_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the device's attention take time in proportion to rows."""
    monkeypatch.setattr(log_probs, "_CHUNK_TOKENS", 96)


def valued(device: str) -> ValueScorer:
    return ValueScorer(Critic(prepared(random_model("qwen3", seed=2))), max_context=CONTEXT, device=device)


MAKERS: dict[str, Callable[[str], Any]] = {
    "llama float32": lambda device: make_scorer(device=device),
    "gemma2 bfloat16": lambda device: make_scorer("gemma2", device=device, dtype="bfloat16"),
    "critic": valued,
}


def numbers_of(scorer: Any, pairs: list[Pair]) -> list[Any]:
    return scorer.values_of(pairs) if isinstance(scorer, ValueScorer) else scorer.log_probs_of(pairs)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MAKERS)
def test_samples_scored_together_have_the_bits_of_each_alone(second: ModuleType, name: str) -> None:
    scorer = MAKERS[name](DEVICE)
    assert (scorer.report.bits, scorer.at_once) == (OWN_BITS, 64)
    alone = []
    for pair in PAIRS:
        scorer._rows._kept.clear()
        alone += numbers_of(scorer, [pair])
    scorer._rows._kept.clear()
    runner, sizes = scorer._rows.runner, []
    hidden = runner._hidden
    runner._hidden = lambda tokens, *rest: sizes.append(len(tokens)) or hidden(tokens, *rest)
    assert numbers_of(scorer, PAIRS) == alone
    num_tokens = 80 + 80 + 66 - 3 + sum(len(answer) + (2 if len(prompt) == 3 else 0) for prompt, answer in PAIRS)
    assert sizes == [96] * -(-num_tokens // 96), "prompts once, and no forward but the last is filled up"
    for found, wanted in zip(alone, numbers_of(MAKERS[name]("cpu"), PAIRS), strict=True):
        np.testing.assert_allclose(found, wanted, atol=0.3 if "bfloat16" in name else 1e-4)


def test_with_few_blocks_fewer_samples_are_scored_together(second: ModuleType) -> None:
    scorer = make_scorer(device=DEVICE)
    expected = scorer.log_probs_of(PAIRS)
    scorer._rows._kept = KeptPrompts(num_blocks=9, block_size=16)
    assert scorer.log_probs_of(PAIRS) == expected


def test_an_error_of_one_sample_does_not_affect_the_others(second: ModuleType) -> None:
    scorer = make_scorer(device=DEVICE)
    before = scorer.log_probs_of(PAIRS)
    poisoned = scorer._rows.runner.fused.model.model.embed_tokens.weight
    poisoned.data[42] = float("nan")
    wrong: list[Pair] = [([5, 6], [7, 42, 8]), ([], [1]), (PROMPTS[0], [1] * CONTEXT)]
    pairs = [*PAIRS[:3], *wrong, *PAIRS[3:]]
    pairs = [pair for pair in pairs if pair in wrong or not {42} & {*pair[0], *pair[1]}]
    kinds = [type(each) for each in scorer.log_probs_of(pairs)]
    assert [kinds[pairs.index(pair)] for pair in wrong] == [NumericalError, InvalidRequest, InvalidRequest]
    again = zip(scorer.log_probs_of(pairs), pairs, strict=True)
    assert all(found == before[PAIRS.index(pair)] for found, pair in again if pair in PAIRS)


def test_a_mixture_of_experts_runs_each_alone(second: ModuleType) -> None:
    """The routing decides how many rows an expert gets."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=CONTEXT, initializer_range=0.1,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    options = {"temperature": 0.7, "max_context": CONTEXT}
    scorer = LogProbScorer(copy.deepcopy(model), device=DEVICE, **options)  # type: ignore[arg-type]
    assert (scorer.report.bits, scorer.at_once) == (BITS_BY_COMPANY, 1)
    expected = LogProbScorer(model, **options).log_probs_of(PAIRS[:3])  # type: ignore[arg-type]
    for found, wanted in zip(scorer.log_probs_of(PAIRS[:3]), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_forwards_of_varying_shape_give_other_bits(second: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device sums few rows in another order, hence the fixed shape."""
    scorer = make_scorer(device=DEVICE)
    monkeypatch.setattr(constant_shape, "_filled", lambda numbers, value, num_rows: np.asarray(numbers))
    assert [scorer.log_probs(*pair) for pair in PAIRS] != scorer.log_probs_of(PAIRS)


def test_on_the_cpu_each_sample_is_scored_alone() -> None:
    assert make_scorer(device="cpu").at_once == 1

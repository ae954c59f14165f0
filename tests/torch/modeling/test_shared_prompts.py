"""Answers that share their prompt equal those with copies (sharePrompts: false, the slow twin)."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import attention_spec
from hypothesis import given, settings, strategies as st
from learners import ALGORITHMS, gradients, learner, rollouts, same_weights, spec

from rlhfspec.kernels.cpu import build
from rlhfspec.sweep import verdict
from rlhfspec.sweep.classes import tiny_config, tiny_model
from rlhfspec.tiny import MODEL_KINDS, random_model
from rlhfspec.training.modeling.critic import Critic
from rlhfspec.training.modeling.exact import ExactForward
from rlhfspec.training.modeling.loading import prepared
from rlhfspec.training.modeling.log_probs import TorchForward
from rlhfspec.training.modeling.one_call import RowPart
from rlhfspec.training.modeling.packed import PackedRow, explicit_attention, pack_sequences, row_attention

CONTEXT = 96
NEEDS_KERNELS = pytest.mark.skipif(build.load() is None, reason=f"needs the CPU kernels: {build.unavailable_reason()}")
# Sinks, chunks, experts, windows of some layers, learned positions.
OTHER_TYPES = ("gpt_oss", "llama4_text", "qwen3_moe", "cohere2", "gpt2")


def drawn(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(90, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


PROMPTS = [*[drawn(9, 1)] * 3, *[drawn(1, 2)] * 2, drawn(33, 3), *[drawn(9, 1)] * 2]
RESPONSES = [drawn(count, 10 + count) for count in (12, 1, 20, 3, 9, 7, 1, 1)]


def batches() -> tuple[PackedRow, PackedRow]:
    shared = pack_sequences(PROMPTS, RESPONSES, share_prompts=True)
    return pack_sequences(PROMPTS, RESPONSES), shared


def assert_close(slow: torch.Tensor, shared: torch.Tensor, tolerance: float) -> None:
    slow, shared = slow.detach(), shared.detach()
    assert float((slow - shared).abs().max()) <= tolerance * max(1.0, float(slow.abs().max()))


def assert_same_gradients(slow: dict[str, torch.Tensor], shared: dict[str, torch.Tensor]) -> None:
    assert slow.keys() == shared.keys()
    largest = max(float(gradient.abs().max()) for gradient in slow.values())
    for name, gradient in slow.items():
        assert (shared[name] - gradient).abs().max() <= 1e-5 * largest, name


def test_a_prompt_is_run_once_and_its_last_row_predicts_every_first_token() -> None:
    batch = pack_sequences([(5, 6)] * 3 + [(7,)], [(1, 2, 3), (4,), (8, 9), (1, 2)], share_prompts=True)
    assert batch.token_ids.tolist() == [[5, 6, 1, 2, 8, 7, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1]]
    assert batch.parts == (RowPart(2), RowPart(2, 0), RowPart(1, 0), RowPart(2))
    assert batch.predicting.tolist() == [1, 2, 3, 1, 1, 4, 5, 6]
    assert batch.targets.tolist() == [1, 2, 3, 4, 8, 9, 1, 2]


def test_an_answer_without_siblings_is_packed_without_sharing() -> None:
    prompts, responses = [(5, 6), (7,), (5, 6)], [(1, 2, 3), (4,), (8, 9)]
    slow, shared = (pack_sequences(prompts, responses, share_prompts=share) for share in (False, True))
    assert slow.parts == shared.parts == (RowPart(4), RowPart(1), RowPart(3))
    for name in ("token_ids", "position_ids", "predicting", "targets"):
        assert torch.equal(getattr(slow, name), getattr(shared, name))


narrow = st.one_of(st.none(), st.integers(1, 12))
groups = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=4)), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(groups=groups, window=narrow, chunk=narrow, softcap=st.sampled_from([0.0, 2.0]), with_sinks=st.booleans())
def test_an_answer_attends_to_its_prompt_and_to_itself(
    groups: list[tuple[int, list[int]]], window: int | None, chunk: int | None, softcap: float, with_sinks: bool
) -> None:
    """Each answer is compared with written-out attention over its whole sequence, by absolute position."""
    parts: list[RowPart] = []
    for prompt, answers in groups:
        parts += [RowPart(prompt), *(RowPart(answer, len(parts)) for answer in answers)]
    generator = torch.Generator().manual_seed(len(parts))
    num_tokens = sum(part.length for part in parts)
    q, k, v = (torch.randn(1, heads, num_tokens, 8, generator=generator) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator) if with_sinks else None
    spec_ = attention_spec(window, chunk)
    found = row_attention(q, k, v, tuple(parts), spec_, 0.3, softcap, sinks)[0].transpose(0, 1)  # [H, T, D]
    places = torch.arange(num_tokens).split([part.length for part in parts])
    for part, own in zip(parts, places, strict=True):
        whole = own if part.behind is None else torch.cat([places[part.behind], own])
        expected = explicit_attention(q[:, :, whole], k[:, :, whole], v[:, :, whole], 0.3, spec_, softcap, sinks)
        torch.testing.assert_close(found[:, own], expected[0, :, -len(own) :], rtol=1e-5, atol=1e-6)


def model_of(kind: str) -> Any:
    return tiny_model(tiny_config(kind)) if kind in OTHER_TYPES else random_model(kind, seed=1)


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("kind", [*MODEL_KINDS, *OTHER_TYPES])
def test_log_probs_and_gradients_are_the_slow_twins(kind: str) -> None:
    forward = TorchForward(prepared(model_of(kind), max_context=CONTEXT), 0.7)
    slow, shared = (forward(batch).log_probs for batch in batches())
    assert_close(slow, shared, 1e-6)
    assert_same_gradients(*(gradients(forward.model, numbers) for numbers in (slow, shared)))


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_values_and_their_gradients_are_the_slow_twins(kind: str) -> None:
    critic = Critic(prepared(model_of(kind), max_context=CONTEXT))
    with torch.no_grad():
        critic.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    slow, shared = (critic(batch) for batch in batches())
    assert_close(slow, shared, 1e-6)
    assert_same_gradients(*(gradients(critic, numbers) for numbers in (slow, shared)))


@pytest.mark.sweep(parts=3)
@NEEDS_KERNELS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [*MODEL_KINDS, *OTHER_TYPES])
def test_the_exact_forward_gives_the_slow_twins_bits(kind: str, dtype: str) -> None:
    forward = ExactForward(prepared(model_of(kind), max_context=CONTEXT), 0.7, max_context=CONTEXT, dtype=dtype)
    slow, shared = (forward(batch) for batch in batches())
    assert torch.equal(slow.log_probs, shared.log_probs)
    assert torch.equal(slow.untempered, shared.untempered)
    if dtype == "float32":
        assert_same_gradients(*(gradients(forward.model, found.log_probs) for found in (slow, shared)))


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("tokens_per_micro_batch", [4096, 40])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_update_with_shared_prompts_equals_one_without(name: str, tokens_per_micro_batch: int) -> None:
    plain = {"optimizer": {"name": "SGD", "learningRate": 0.01}, "criticOptimizer": {"name": "SGD"}}
    plain |= {"tokensPerMicroBatch": tokens_per_micro_batch, "miniBatches": 2}
    shared, slow = (learner(spec(name, sharePrompts=share, **plain)) for share in (True, False))
    ours, theirs = shared.learn(rollouts()), slow.learn(rollouts())
    assert_close(theirs.log_probs, ours.log_probs, 1e-6)
    same_weights(shared.policy_state(), slow.policy_state(), 1e-6)
    if name == "ppo":
        same_weights(shared.critic_state(), slow.critic_state(), 1e-6)


def num_tokens_run(trained: Any) -> int:
    counts: list[int] = []
    embedding = trained.policy.get_input_embeddings()
    embedding.register_forward_hook(lambda module, given, out: counts.append(given[0].numel()))
    trained.learn(rollouts())
    return sum(counts)


def test_the_learner_runs_each_prompt_once() -> None:
    own = int((rollouts().lengths - 1).sum())
    assert num_tokens_run(learner(spec())) == own + 3 + 2
    assert num_tokens_run(learner(spec(sharePrompts=False))) == own + 4 * (3 + 2)
    assert num_tokens_run(learner(spec(miniBatches=4))) == 2 * (own + 2 * (3 + 2)), "and the old log-probs likewise"


def test_a_low_rank_update_shares_prompts_unless_it_has_dropout(caplog: pytest.LogCaptureFixture) -> None:
    own = int((rollouts().lengths - 1).sum())
    with caplog.at_level(logging.INFO, logger="rlhfspec.training.learning"):
        assert num_tokens_run(learner(spec(model={"lora": {"rank": 2}}))) == own + 3 + 2
        assert not caplog.messages
        with_dropout = learner(spec(model={"lora": {"rank": 2, "dropout": 0.1}}))
        assert num_tokens_run(with_dropout) == 2 * (own + 4 * (3 + 2)), "old log-probs, then the update"
    assert [message for message in caplog.messages if "model.lora.dropout" in message] == caplog.messages
    assert len(caplog.messages) == 1


def test_the_sweep_notices_answers_at_other_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    def misplaced(*sequences: Any, share_prompts: bool = False) -> PackedRow:
        batch = pack_sequences(*sequences, share_prompts=share_prompts)
        starts = [torch.arange(length) for length in batch.lengths]
        return replace(batch, position_ids=torch.cat(starts)[None]) if share_prompts else batch

    monkeypatch.setattr(verdict, "pack_sequences", misplaced)
    found = verdict.judge(lambda: tiny_model(tiny_config("qwen2")))
    assert found.kind == "wrong"
    assert "answers that share their prompt have other log-probs" in found.detail

"""Scorers run a prompt once for its answers without changing a number."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from on_device import BY_COMPANY
from scorers import row_sensitive_scorer

from rlhfspec.common.arrays import IntArray
from rlhfspec.engine.forward import runner
from rlhfspec.errors import NumericalError
from rlhfspec.kernels.cpu import build
from rlhfspec.tiny import random_model
from rlhfspec.training.modeling.critic import Critic
from rlhfspec.training.modeling.loading import prepared
from rlhfspec.training.scoring.kept_prompts import LEAST_TOKENS, KeptPrompts
from rlhfspec.training.scoring.log_probs import LogProbScorer, SequenceRows
from rlhfspec.training.scoring.values import ValueScorer

needs_kernels = pytest.mark.skipif(build.load() is None, reason=f"needs the CPU kernels: {build.unavailable_reason()}")
CONTEXT = 160
POISON = 91  # a token whose embedding is no number
_DRAW = np.random.default_rng(0)
_LONG = _DRAW.integers(3, 90, 120).tolist()
PROMPTS = [
    _LONG[:100],
    _LONG[:80],  # the beginning of the first
    [*_LONG[:99], 5],  # differs in the token that is run with the answer
    [*_LONG[:98], 5, _LONG[99]],  # ... and in the one before
    [5, *_LONG[:99]],
    _LONG[: LEAST_TOKENS + 1],  # the shortest that is kept
    _LONG[:LEAST_TOKENS],
    _LONG[:3],
]
ANSWERS = [_DRAW.integers(3, 90, size).tolist() for size in (1, 2, 17, 60)]


@contextmanager
def counted(rows: SequenceRows) -> Iterator[list[int]]:
    numbers: list[int] = []
    forward = rows.runner.forward

    def counting(tokens: IntArray, *arguments: Any, **options: Any) -> torch.Tensor:
        numbers.append(len(tokens))
        return forward(tokens, *arguments, **options)

    rows.runner.forward = counting  # type: ignore[method-assign]
    try:
        yield numbers
    finally:
        rows.runner.forward = forward  # type: ignore[method-assign]


@given(calls=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40), st.booleans()), max_size=60))
def test_blocks_belong_to_one_prompt_and_the_longest_unused_goes_first(calls: list[tuple[int, int, bool]]) -> None:
    kept = KeptPrompts(num_blocks=6, block_size=16)
    latest: list[bytes] = []
    for number, size, fails in calls:
        prompt = np.full(20 + number, number, np.int32)
        held = kept.find(prompt)
        if held is None:
            held = kept.take(len(prompt))
            kept.keep(prompt, held)
        own = kept.take(size)
        assert kept.find(prompt) == held, "the prompt of the answer that is run went"
        in_use = [block for blocks in kept._blocks.values() for block in blocks] + own + kept._free
        assert sorted(in_use) == list(range(6))
        latest = [*(key for key in latest if key != prompt.tobytes()), prompt.tobytes()]
        assert list(kept._blocks) == latest[-len(kept) :]
        if fails:
            kept.clear()
            latest = []
        else:
            kept.give_back(own)


@functools.cache
def reference(dtype: str, *, keep_prompts: bool) -> LogProbScorer:
    model = random_model("gemma2", seed=2)  # windows, soft caps
    model.model.embed_tokens.weight.data[POISON] = torch.nan
    return LogProbScorer(model, temperature=0.7, max_context=CONTEXT, dtype=dtype, keep_prompts=keep_prompts)


@functools.cache
def critic_weights(seed: int) -> dict[str, torch.Tensor]:
    critic = Critic(prepared(random_model("qwen3", seed=2)))
    generator = torch.Generator().manual_seed(seed)
    return {n: t + 0.05 * torch.randn(t.shape, generator=generator).to(t) for n, t in critic.state_dict().items()}


@functools.cache
def values_of(*, keep_prompts: bool) -> ValueScorer:
    critic = Critic(prepared(random_model("qwen3", seed=2)))
    return ValueScorer(critic, max_context=CONTEXT, keep_prompts=keep_prompts)


samples = st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, len(ANSWERS) - 1))
mostly_samples = st.one_of(samples, samples, samples, samples, st.sampled_from([1, 2]))


@needs_kernels
@pytest.mark.on_the_cpu(BY_COMPANY)
@settings(max_examples=15, deadline=None)
@given(
    asked=st.lists(mostly_samples, min_size=1, max_size=16),
    num_blocks=st.integers(11, 99),
    chunk=st.integers(7, 200),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_no_order_no_error_and_no_lack_of_memory_changes_a_reference_score(
    asked: list[tuple[int, int] | int], num_blocks: int, chunk: int, dtype: str
) -> None:
    """The slow twin runs every sample from its first token."""
    keeping, whole = reference(dtype, keep_prompts=True), reference(dtype, keep_prompts=False)
    keeping._rows._kept = KeptPrompts(num_blocks=num_blocks, block_size=16)
    keeping._rows._chunk_tokens = chunk
    for sample in asked:
        if isinstance(sample, int):
            with pytest.raises(NumericalError):
                keeping.log_probs(PROMPTS[0], [4, POISON, 4, 4])
            assert len(keeping._rows._kept) == 0
        else:
            prompt, answer = PROMPTS[sample[0]], ANSWERS[sample[1]]
            assert keeping.log_probs(prompt, answer) == whole.log_probs(prompt, answer)


@needs_kernels
@pytest.mark.on_the_cpu(BY_COMPANY)
@settings(max_examples=15, deadline=None)
@given(asked=st.lists(mostly_samples, min_size=1, max_size=16))
def test_new_weights_of_the_critic_clear_the_kept_prompts(asked: list[tuple[int, int] | int]) -> None:
    keeping, whole = values_of(keep_prompts=True), values_of(keep_prompts=False)
    for place, sample in enumerate(asked):
        if place == 0 or isinstance(sample, int):
            seed = sample if isinstance(sample, int) else 1
            for scorer in (keeping, whole):
                scorer.load_weights(critic_weights(seed), scorer.version + 1)
            assert len(keeping._rows._kept) == 0
        if isinstance(sample, tuple):
            prompt, answer = PROMPTS[sample[0]], ANSWERS[sample[1]]
            assert keeping.values(prompt, answer) == whole.values(prompt, answer)


@pytest.mark.on_the_cpu("forwards of one shape leave no neighbours to depend on")
def test_kept_prompts_give_the_same_bits_where_bits_depend_on_other_rows() -> None:
    """On a GPU this is so, and all batches must be cut alike."""
    scorer = row_sensitive_scorer(CONTEXT)
    pairs = [(prompt, answer) for answer in ANSWERS for prompt in PROMPTS]
    with counted(scorer._rows) as run_with_kept:
        found = [scorer.log_probs(*pair) for pair in pairs]
    alone = []
    for pair in pairs:
        scorer._rows._kept.clear()
        alone.append(scorer.log_probs(*pair))
    assert found == alone
    assert sum(run_with_kept) < sum(len(prompt) + len(answer) - 1 for prompt, answer in pairs) / 1.5


@needs_kernels
@pytest.mark.on_the_cpu(BY_COMPANY)
def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    scorer, expected = reference("float32", keep_prompts=True), []
    for answer in ANSWERS:
        scorer._rows._kept.clear()
        expected.append(scorer.log_probs(PROMPTS[0], answer))
    forward = scorer._rows.runner.forward
    for fails_at in range(2):  # in the prompt; in the answer
        scorer._rows._kept.clear()
        calls = iter(range(9))

        def failing(*args: Any, calls: Iterator[int] = calls, fails_at: int = fails_at, **options: Any) -> torch.Tensor:
            if next(calls) == fails_at:
                raise RuntimeError("no memory")
            return forward(*args, **options)

        scorer._rows.runner.forward = failing  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="no memory"):
            scorer.log_probs(PROMPTS[0], ANSWERS[2])
        scorer._rows.runner.forward = forward  # type: ignore[method-assign]
        assert len(scorer._rows._kept) == 0
        assert len(scorer._rows._kept._free) == scorer._rows._kept.num_blocks
        assert [scorer.log_probs(PROMPTS[0], answer) for answer in ANSWERS] == expected


def tokens_run(scorer: LogProbScorer, pairs: Sequence[tuple[list[int], list[int]]]) -> int:
    with counted(scorer._rows) as numbers:
        for prompt, answer in pairs:
            scorer.log_probs(prompt, answer)
    return sum(numbers)


def test_a_prompt_is_run_once_for_answers_that_do_not_come_in_a_row() -> None:
    scorer = LogProbScorer(random_model("llama", seed=2), temperature=1.0, max_context=CONTEXT)
    prompts, answers = [PROMPTS[0], PROMPTS[2], PROMPTS[4]], [[7, 8, 9], [10, 11, 12], [3, 4, 5]]
    pairs = [(prompt, answer) for answer in answers for prompt in prompts]
    distinct_prompts = {tuple(prompt[:-1]) for prompt in prompts}  # two differ in the last token only
    assert tokens_run(scorer, pairs) == sum(map(len, distinct_prompts)) + len(pairs) * 3
    alone = LogProbScorer(random_model("llama", seed=2), temperature=1.0, max_context=CONTEXT, keep_prompts=False)
    assert tokens_run(alone, pairs) == sum(len(prompt) + 2 for prompt, _ in pairs)


@pytest.mark.on_the_cpu("elsewhere there is room for what runs together too")
def test_kept_prompts_take_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence always fits; kept prompts take what is left."""
    sizes = {}
    for spare_bytes in (0, 100_000, 1 << 40):
        monkeypatch.setattr(runner, "SPARE_BYTES", spare_bytes)
        scorer = LogProbScorer(random_model("llama", seed=2), temperature=1.0, max_context=CONTEXT)
        for answer in ANSWERS:
            for prompt in PROMPTS:
                scorer.log_probs(prompt, answer)
        sizes[spare_bytes] = scorer._rows.runner.kv.nbytes
        assert tokens_run(scorer, [(PROMPTS[0], [1, 2])] * 3) <= 99 + 3 * 2
    alone = LogProbScorer(random_model("llama", seed=2), temperature=1.0, max_context=CONTEXT, keep_prompts=False)
    assert sizes[0] == alone._rows.runner.kv.nbytes
    assert sizes[0] < sizes[100_000] <= sizes[0] + 100_000
    assert sizes[1 << 40] == 9 * sizes[0]

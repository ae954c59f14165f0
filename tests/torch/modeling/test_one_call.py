"""A packed row's attention in one call, with a stand-in for the GPU-only `varlen_attn`."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import attention_spec
from flash_played import WRONG, played
from hypothesis import given, strategies as st
from learners import learner, rollouts, spec
from sweeps import examples
from torch.nn.attention import varlen

from rlhfspec.kernels import flash as kernel
from rlhfspec.training.modeling import one_call
from rlhfspec.training.modeling.one_call import RowPart
from rlhfspec.training.modeling.packed import _by_parts, row_attention


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernel, "has_flash", lambda device: True)
    monkeypatch.setattr(kernel, "varlen_attn", played)
    one_call.agrees.cache_clear()
    yield
    one_call.agrees.cache_clear()


def test_our_call_matches_the_signature_of_varlen_attn() -> None:
    ours, theirs = (inspect.signature(function).parameters for function in (played, varlen.varlen_attn))
    assert [theirs[name].kind for name in ours] == [parameter.kind for parameter in ours.values()]


groups = st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(1, 9), max_size=3)), min_size=1, max_size=4)


@examples(20, whole=200)
@given(groups=groups, window=st.none() | st.integers(1, 12), kv_heads=st.sampled_from([1, 2, 4]))
def test_one_call_equals_attention_part_by_part(groups: Any, window: int | None, kv_heads: int) -> None:
    """Numbers and gradients are equal, also for shared prompts."""
    parts: list[RowPart] = []
    for prompt, answers in groups:
        parts += [RowPart(prompt), *(RowPart(answer, len(parts)) for answer in answers)]
    drawn, count = torch.Generator().manual_seed(len(parts)), sum(part.length for part in parts)
    row = [torch.randn(1, heads, count, 16, generator=drawn).requires_grad_() for heads in (4, kv_heads, kv_heads)]
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "varlen_attn", played)
        for name, attention in (("one", one_call.attention), ("parts", _by_parts)):
            out = attention(*row, tuple(parts), attention_spec(window), 0.3)
            found[name] = [out, *torch.autograd.grad((out * torch.linspace(-1, 1, 16)).sum(), row)]
    for one, other in zip(found["one"], found["parts"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recompute", ["off", "on"])
def test_a_learner_learns_the_same_with_one_call(flash: None, monkeypatch: pytest.MonkeyPatch, recompute: str) -> None:
    """This covers autocast, where RoPE makes queries float32 again, and recomputed layers."""
    settings = spec(autocast="bfloat16", activationCheckpointing=recompute)
    heads = learner(settings)._policy.config.head_dim
    monkeypatch.setattr(kernel, "_HEAD_UNIT", heads)  # a tiny model's are of no size that FlashAttention knows
    calls = []
    monkeypatch.setattr(kernel, "varlen_attn", lambda *row, **how: calls.append(row[0].dtype) or played(*row, **how))
    found = learner(settings).learn(rollouts(0))
    assert set(calls) == {torch.bfloat16}
    assert one_call.agrees.cache_info().currsize == 1
    monkeypatch.setattr(kernel, "has_flash", lambda device: False)
    wanted = learner(settings).learn(rollouts(0))
    truth = learner(spec(autocast="off")).learn(rollouts(0))
    found_off, wanted_off = (float((each.log_probs - truth.log_probs).abs().mean()) for each in (found, wanted))
    assert found_off < 1.3 * wanted_off, "further from float32 than the twin is"
    for name in ("grad_norm", "entropy"):
        assert found.metrics[name] == pytest.approx(truth.metrics[name], rel=0.05)


@pytest.mark.parametrize(
    ("dtype", "dim", "value_dim", "chunk", "is_taken"),
    [
        (torch.bfloat16, 16, 16, None, True), (torch.bfloat16, 16, 16, 4, False),
        (torch.float32, 16, 16, None, False), (torch.bfloat16, 12, 12, None, False),
        (torch.bfloat16, 512, 512, None, False), (torch.bfloat16, 16, 8, None, False),
    ],
)  # fmt: skip
def test_unsupported_attention_is_left_to_the_twin(
    flash: None, dtype: torch.dtype, dim: int, value_dim: int, chunk: int | None, is_taken: bool
) -> None:
    row = [torch.zeros(1, heads, 4, size, dtype=dtype) for heads, size in ((4, dim), (2, dim), (2, value_dim))]
    assert one_call.takes(*row, attention_spec(chunk=chunk), _by_parts) is is_taken


def test_a_device_with_a_wrong_attention_is_detected(
    flash: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    row = [torch.randn(1, heads, 4, 16, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    parts, seen = (RowPart(3), RowPart(1, 0)), attention_spec()
    for wrong, said in WRONG:
        monkeypatch.setattr(kernel, "varlen_attn", wrong)
        one_call.agrees.cache_clear()
        assert torch.equal(row_attention(*row, parts, seen, 0.3, 0.0, None), _by_parts(*row, parts, seen, 0.3))
        assert said in caplog.text


def test_a_cpu_has_no_flash_attention() -> None:
    assert not kernel.has_flash(torch.device("cpu"))

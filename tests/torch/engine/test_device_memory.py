"""KV takes the device memory left by weights and the largest forward, and no more than useful."""

import gc
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfspec.engine import Engine, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.loading import make_engine
from rlhfspec.errors import InvalidRequest
from rlhfspec.tiny import perturbed, random_model

MIB = 1 << 20


def engine_on_second(*, drafter: bool = False, **options: Any) -> Engine:
    settings = {"max_sequences": 64, "max_context": 512, "profile": False, "speculation": "off"} | options
    model = random_model("llama", seed=0)
    return make_engine(
        model, EngineConfig(device="second:0", **settings), draft=perturbed(model, 0.1) if drafter else None
    )


def kv_bytes(engine: Engine) -> int:
    return sum(space.runner.kv.nbytes for space in engine.state.spaces)


def test_weights_reach_the_device_in_the_type_in_which_they_are_kept(second: Any) -> None:
    """In float32, a model that fits might not."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97, hidden_size=768, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=12,
            max_position_embeddings=128,
        )
    ).eval()  # fmt: skip
    weights = sum(parameter.numel() for parameter in model.parameters()) * torch.bfloat16.itemsize
    config = EngineConfig(
        device="second:0", dtype="bfloat16", max_sequences=1, max_context=64, prefill_chunk=16, profile=False,
        speculation="off",
    )  # fmt: skip
    with second.limited(int(1.8 * weights)):
        make_engine(model, config)


def test_a_roomy_device_holds_every_row_at_full_context(second: Any) -> None:
    engine = engine_on_second()
    assert engine.state.config.num_blocks == EngineConfig(max_sequences=64, max_context=512).num_blocks


@pytest.mark.parametrize("drafter", [False, True])
def test_kv_takes_what_is_left(second: Any, drafter: bool) -> None:
    whole = kv_bytes(engine_on_second(drafter=drafter))
    with second.limited((36 if drafter else 27) * MIB):
        engine = engine_on_second(drafter=drafter)
        assert 4 * MIB < kv_bytes(engine) < whole
        assert engine.stats().num_blocks == len(engine.state.target.runner.kv)
        done = engine.generate([[5] * 300] * 24, SamplingParams(max_tokens=8, ignore_eos=True))
        assert [len(each.token_ids) for each in done] == [8] * 24
        engine.check_integrity()
        smaller = kv_bytes(engine)
        del engine
        gc.collect()
        assert kv_bytes(engine_on_second(drafter=drafter, gpu_memory_fraction=0.6)) < smaller


def test_a_model_that_does_not_fit_is_refused_with_the_sum(second: Any) -> None:
    with second.limited(MIB // 4), pytest.raises(InvalidRequest) as refused:
        engine_on_second()
    assert refused.value.field == "gpu_memory_fraction"
    assert "weights" in str(refused.value)


def test_a_forward_that_does_not_fit_is_refused_with_the_sum(second: Any) -> None:
    with second.limited(12 * MIB), pytest.raises(InvalidRequest, match=r"2 forwards .* GB, keys and values of one seq"):
        engine_on_second()
    with second.limited(5 * MIB), pytest.raises(InvalidRequest, match="out of memory"):
        engine_on_second()


def test_the_size_that_was_asked_for_is_taken_or_refused(second: Any) -> None:
    assert engine_on_second(kv_cache_tokens=1024).stats().num_blocks == 64
    with second.limited(4 * MIB), pytest.raises(InvalidRequest, match="of keys and values"):
        engine_on_second(kv_cache_tokens=1 << 20)

"""The engine on another device: same bits, few exchanges with the device."""

from typing import Any

import pytest
import torch
from on_device import DEVICE

from rlhfspec.engine import Engine, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.errors import InvalidRequest
from rlhfspec.huggingface import checksums
from rlhfspec.kernels import linear
from rlhfspec.sweep.classes import tiny_config, tiny_model
from rlhfspec.tiny import random_model

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [5, 6, 7], [3, 1]]


def engine_on(device: str, *, kind: str = "llama", **options: Any) -> Engine:
    settings = {"max_sequences": 4, "max_context": 64, "profile": False, "speculation": "suffix"}
    settings |= {"num_threads": 1, "arithmetic": "torch"} | options
    return make_engine(random_model(kind, seed=0), EngineConfig(device=device, **settings))


def answers(engine: Engine) -> list[Any]:
    done = engine.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True), seeds=[1, 2, 3, 4])
    return [(each.token_ids, each.log_probs) for each in done]


@pytest.mark.parametrize("device", ["second:0", "second:1"])
def test_tokens_and_log_probs_are_those_of_the_cpu(second: Any, device: str) -> None:
    there = engine_on(device)
    assert {tensor.device for tensor in there.state.target.runner.fused.held()} == {torch.device(device)}
    found = answers(there)
    with second.without_kernels():
        assert found == answers(engine_on("cpu"))


def test_the_default_device_is_that_of_the_test_suite() -> None:
    assert EngineConfig().device == DEVICE


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="device"):
        EngineConfig(device="gpu")


def test_moves_between_devices_do_not_depend_on_the_cpu(second: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    here = engine_on("second:0", arithmetic="auto").state.target.runner
    assert here.config.arithmetic == "torch"
    monkeypatch.setattr(linear, "available_arithmetics", lambda dtype: ("amx", "fma", "torch"))
    assert engine_on("second:0", arithmetic="auto").state.target.runner.architecture == here.architecture


@pytest.mark.parametrize("context", [64, 1000, 4000])
def test_long_contexts_run_in_bfloat16(second: Any, context: int) -> None:
    """Rounded RoPE angles would shift logits by .15 of the largest at position 1,000."""
    model = random_model("llama", seed=0)
    model.config.max_position_embeddings = 4096  # angles do not depend on it
    settings = {"max_sequences": 1, "max_context": context, "profile": False, "speculation": "off"}
    engine = make_engine(model, EngineConfig(device="second:0", dtype="bfloat16", **settings))
    assert engine.reports["model"].difference < 0.03


def test_new_values_of_a_buffer_reach_the_device(second: Any) -> None:
    settings = {"max_sequences": 2, "max_context": 64, "profile": False, "speculation": "off"}
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    model = tiny_model(tiny_config("deepseek_v3"))
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    engine = make_engine(model, EngineConfig(device="second:0", **settings))
    state[name] += torch.linspace(0.1, 0.3, len(state[name]))
    engine.load_weights(state, version=1)
    assert torch.equal(engine.state.target.runner.fused.model.get_buffer(name).cpu(), state[name])


def test_a_fingerprint_is_computed_where_the_weights_are(second: Any) -> None:
    """Steps wait for it, so one copy of 8 bytes a tensor comes down, and nothing goes up."""
    runner = engine_on("second:0").state.target.runner
    with second.counted() as seen:
        first = runner.fingerprint()
    held = list(runner.fused.held())
    assert (seen.h2d, seen.d2h, seen.waits) == (0, 1, 1)
    assert seen.d2h_bytes == 8 * len(held)
    weights = {name: tensor.clone() for name, tensor in random_model("llama", seed=0).state_dict().items()}
    runner.load_weights(weights)
    assert runner.fingerprint() == first
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-6
    runner.load_weights(weights)
    assert runner.fingerprint() != first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [1, 2, 7, 64, 3 * 5000 + 1])
def test_a_checksum_sees_every_change(monkeypatch: pytest.MonkeyPatch, size: int, dtype: torch.dtype) -> None:
    """The changes are one bit, two swapped words, and words beyond one summed part."""
    monkeypatch.setattr(checksums, "_WORDS_AT_A_TIME", 4096)
    tensor = torch.randint(1, 100, (size,), generator=torch.Generator().manual_seed(size)).to(dtype)
    seen = {checksums.checksums_on_device([tensor])[0]}
    places = sorted({0, size // 3, size - 1})
    for place in places:
        changed = tensor.clone().view(torch.uint8)
        changed[place * tensor.element_size()] ^= 1
        seen |= {checksums.checksums_on_device([changed.view(dtype)])[0]}
    assert len(seen) == 1 + len(places)
    swapped = tensor.clone()
    swapped[0], swapped[-1] = tensor[-1].clone(), tensor[0].clone()
    is_same = bool(tensor[0] == tensor[-1])
    assert (checksums.checksums_on_device([swapped]) == checksums.checksums_on_device([tensor])) is is_same

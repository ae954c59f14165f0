"""Planted bugs are named by the proof at load, and found by the sweep's judge without it."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.forward import runner
from rlhfspec.errors import UnsupportedModel
from rlhfspec.huggingface.fused import native
from rlhfspec.huggingface.fused.experts import PackedExperts
from rlhfspec.huggingface.fused.rotary import RotaryTable
from rlhfspec.huggingface.proof import reference
from rlhfspec.huggingface.structure import anatomy
from rlhfspec.kernels.linear import PackedLinear
from rlhfspec.sweep.classes import tiny_config, tiny_model
from rlhfspec.sweep.verdict import judge

ORIGINAL = 64  # positions of the RoPE scalings below
Plant = Callable[[pytest.MonkeyPatch], None]


def in_specs(patch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    found = anatomy._Tracer.specs
    patch.setattr(anatomy._Tracer, "specs", lambda self, near, far: tuple(map(change, found(self, near, far))))


def behind_fuse(patch: pytest.MonkeyPatch, spoil: Callable[[Any], None]) -> None:
    fuse = runner.fuse

    def spoilt(*arguments: Any, **keywords: Any) -> Any:
        fused = fuse(*arguments, **keywords)
        spoil(fused.model)
        return fused

    patch.setattr(runner, "fuse", spoilt)


def longer_window(patch: pytest.MonkeyPatch) -> None:
    in_specs(patch, lambda spec: replace(spec, window=spec.window + 1))


def shorter_chunk(patch: pytest.MonkeyPatch) -> None:
    in_specs(patch, lambda spec: replace(spec, chunk=spec.chunk and spec.chunk - 1))


def other_scale(patch: pytest.MonkeyPatch) -> None:
    attend = runner.tree_attention
    in_specs(patch, lambda spec: replace(spec, scale=spec.scale * 1.01))  # for the one-call decoder
    patch.setattr(runner, "tree_attention", lambda *a, **k: attend(*a, **(k | {"scale": k["scale"] * 1.01})))


def lost_bias(patch: pytest.MonkeyPatch) -> None:
    def spoil(model: Any) -> None:
        layer: PackedLinear = model.model.layers[2].self_attn.v_proj
        assert layer.bias is not None
        with torch.inference_mode():
            layer.bias.zero_()

    behind_fuse(patch, spoil)


def forgotten_rope(patch: pytest.MonkeyPatch) -> None:
    scaled = RotaryTable._make

    def make(self: RotaryTable, x: torch.Tensor, args: Any, kwargs: Any) -> Any:
        tables = scaled(self, x, args, kwargs)
        dim = tables[0].shape[1]
        turns = 10000.0 ** -(torch.arange(0, dim, 2) / dim)
        angles = torch.outer(torch.arange(len(tables[0])), turns).repeat(1, 2)
        for table, plain in zip(tables, (angles.cos(), angles.sin()), strict=True):
            table[ORIGINAL:] = plain[ORIGINAL:]
        return tables

    patch.setattr(RotaryTable, "_make", make)


def swapped_experts(patch: pytest.MonkeyPatch) -> None:
    def spoil(model: Any) -> None:
        experts = next(module for module in model.modules() if isinstance(module, PackedExperts))
        layers = experts.mlps or experts.ups
        layers[0], layers[1] = layers[1], layers[0]

    behind_fuse(patch, spoil)


def swapped_expert_weights(patch: pytest.MonkeyPatch) -> None:
    forward = PackedExperts.forward
    patch.setattr(PackedExperts, "forward", lambda self, x, index, weights: forward(self, x, index, weights.flip(1)))


@dataclass(frozen=True)
class Bug:
    model_type: str
    plant: Plant
    changes: tuple[tuple[str, Any], ...] = ()

    def make(self) -> Callable[[], Any]:
        return partial(tiny_model, tiny_config(self.model_type, **dict(self.changes)))


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
BUGS = {
    "window off by one": Bug("mistral", longer_window, (("sliding_window", 24),)),
    "a long window off by one": Bug("mistral", longer_window, (("sliding_window", 80),)),
    "window off by one, with sinks": Bug(
        "gpt_oss", longer_window, (("sliding_window", 24), ("layer_types", ["sliding_attention"] * 4))
    ),
    "chunk off by one": Bug("llama4_text", shorter_chunk, (("attention_chunk_size", 24),)),
    "scale changed": Bug("llama", other_scale),
    "scale changed, layer by layer": Bug("gemma2", other_scale, (("query_pre_attn_scalar", 1),)),
    "a layer's bias dropped": Bug("llama", lost_bias, (("attention_bias", True),)),
    "a layer's bias dropped, in qwen2": Bug("qwen2", lost_bias),
    "llama3 RoPE ignored behind its original length": Bug("llama", forgotten_rope, (("rope_parameters", LLAMA3),)),
    "YaRN ignored behind its original length": Bug("olmo2", forgotten_rope, (("rope_parameters", YARN),)),
    "one expert swapped": Bug("mixtral", swapped_experts),
    "one expert swapped, in qwen3": Bug("qwen3_moe", swapped_experts),
    "one expert swapped, with biases": Bug("gpt_oss", swapped_experts),
    "experts' weights swapped": Bug("mixtral", swapped_expert_weights),
}  # fmt: skip


def load(make: Callable[[], Any], dtype: str = "float32") -> Any:
    config = EngineConfig(
        speculation="off", profile=False, num_threads=1, max_sequences=2, max_context=128, dtype=dtype
    )
    return make_engine(make(), config)


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BUGS)
def test_the_proof_at_load_refuses_it(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = BUGS[name]
    if (name, dtype) == ("scale changed, layer by layer", "bfloat16"):
        pytest.skip("1 % of a scale, and scores that are capped: less than the proof's tolerance of rounding")
    assert load(bug.make(), dtype).reports["model"].difference < 0.02
    bug.plant(monkeypatch)
    with pytest.raises(UnsupportedModel, match="logits differ from Hugging Face's"):
        load(bug.make(), dtype)


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_the_judge_finds_it_without_the_proof(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference.Reference, "check", lambda *given, **named: 0.0)
    bug.plant(monkeypatch)
    verdict = judge(bug.make())
    assert verdict.kind == "wrong", verdict
    assert "the oracle" in verdict.detail


def test_one_call_decoders_need_the_windows(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    make = BUGS["window off by one"].make()
    assert load(make).reports["model"].path == "native"
    genuine = native.DecoderParts
    monkeypatch.setattr(
        native, "DecoderParts", lambda trunk, head, scale, windows, split: genuine(trunk, head, scale, [0] * 4, split)
    )
    with caplog.at_level(logging.WARNING):
        assert load(make).reports["model"].path == "layers"
    assert "other bits than the layers" in caplog.text

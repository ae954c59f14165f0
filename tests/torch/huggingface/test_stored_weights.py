"""Weights kept in bfloat16 are never whole in float32 on the host, with the same results."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhfspec.engine import SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.errors import UnsupportedModel
from rlhfspec.huggingface.fused import widened
from rlhfspec.huggingface.fused.casting import Precision, cast, precision_of
from rlhfspec.huggingface.fused.guard import Guard
from rlhfspec.huggingface.loading import load_model, load_stored
from rlhfspec.huggingface.proof.check import report_of
from rlhfspec.huggingface.proof.probes import choose
from rlhfspec.huggingface.proof.reference import Reference, Rounding, ask
from rlhfspec.huggingface.structure.anatomy import examine
from rlhfspec.sweep.classes import tiny_config, tiny_model
from rlhfspec.tiny import random_model
from rlhfspec.training.modeling.loading import prepared

BF16 = torch.bfloat16


def mixed(folder: Path, kind: str) -> Path:
    tiny_model(tiny_config(kind)).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        weights[name] = tensor if "norm" in name else tensor.to(BF16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v3", "mixtral"])
def test_weights_stay_in_the_type_of_their_file_and_buffers_are_what_they_were(kind: str, tmp_path: Path) -> None:
    wide = type(tiny_model(tiny_config(kind))).from_pretrained(mixed(tmp_path, kind), dtype=torch.float32)
    stored, widened_ = load_stored(tmp_path), load_model(tmp_path)
    assert {parameter.dtype for parameter in stored.parameters()} == {BF16, torch.float32}
    for model in (stored, widened_):
        found = {name: (each.float(), each.dtype) for name, each in model.named_buffers()}
        assert found.keys() == dict(wide.named_buffers()).keys()
        assert all(torch.equal(found[n][0], b) and found[n][1] == b.dtype for n, b in wide.named_buffers())
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.float(), wide.get_parameter(name)), name
            assert ("norm" in name) <= (parameter.dtype == torch.float32), name
    assert {parameter.dtype for parameter in widened_.parameters()} == {torch.float32}


def reference(model: Any, *, arithmetic: str = "amx") -> Reference:
    anatomy = examine(model, name="model", max_context=64)
    rounding = Rounding(model, precision_of(model, BF16), arithmetic=arithmetic)
    probes = choose(anatomy, model.config, 64, int(model.get_input_embeddings().num_embeddings))
    return ask(model, anatomy, probes, name="model", rounding=rounding)


KINDS = ("llama", "llama-tied", "gemma2", "gpt2", "mixtral", "gpt_oss", "deepseek_v3", "zamba2", "phi3")


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_at_a_time_gives_the_bits_of_all_at_once(kind: str) -> None:
    """The answers include rounded rows and products moved by noise; weights are known by address."""
    try:
        narrow = random_model(kind, seed=1) if kind == "llama-tied" else tiny_model(tiny_config(kind))
        precision = precision_of(narrow, BF16)
        cast(narrow, precision)
        wide = copy.deepcopy(narrow)
        widened.widen(wide.parameters())
        found = reference(narrow)
    except UnsupportedModel as error:
        with pytest.raises(UnsupportedModel, match=str(error)[:30]):
            reference(wide)
        return
    wanted = reference(wide)
    assert found.noise == wanted.noise
    for one, other in zip(found.answers, wanted.answers, strict=True):
        assert torch.equal(one.logits, other.logits)
    assert all(p.dtype == precision.of(name) for name, p in narrow.named_parameters()), "all is as it was"


def test_only_the_layer_that_runs_is_wide() -> None:
    model = random_model("llama", seed=0)
    cast(model, Precision(BF16))
    seen: list[list[torch.dtype]] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(
            lambda *_: seen.append([each.mlp.up_proj.weight.dtype for each in model.model.layers])
        )
    with widened.one_layer_wide(model):
        model(torch.tensor([[1, 2, 3]]))
    assert seen == [[torch.float32, BF16], [BF16, torch.float32]]


def test_a_forward_that_fails_leaves_weights_as_they_were() -> None:
    model = random_model("llama", seed=0)
    cast(model, Precision(BF16))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), widened.one_layer_wide(model):
        model(torch.tensor([[1, 2, 3]]))
    assert all(torch.equal(p, before[n]) and p.dtype == BF16 for n, p in model.named_parameters())


def test_a_wide_weight_is_forgotten_with_its_memory() -> None:
    """A later tensor at the same address is no weight."""
    weight = torch.nn.Parameter(torch.randn(8, 16).to(BF16))
    guard = Guard(arithmetic="auto")
    guard.know([("weight", weight)], Precision(BF16))
    copied = weight.float()
    assert not guard._is_weight(copied, torch.randn(2, 16))
    guard.copied(weight.data, copied)
    assert guard._is_weight(copied, torch.randn(2, 16))
    assert guard.kept_as(copied[2:]) == BF16
    guard.gone(copied)
    assert not guard._is_weight(copied, torch.randn(2, 16))


def test_an_engine_of_stored_weights_is_that_of_wide_ones(tmp_path: Path) -> None:
    """Tokens, log-probs and trainer reports are equal to the bit, in both types."""
    cast(model := random_model("qwen3", seed=2), Precision(BF16))
    model.save_pretrained(tmp_path)
    for dtype in ("bfloat16", "float32"):
        options: dict[str, Any] = {"speculation": "off", "profile": False, "num_threads": 1, "max_sequences": 2}
        config = EngineConfig(dtype=dtype, max_context=64, **options)
        found = []
        for load in (load_stored, load_model):
            engine = make_engine(load(tmp_path), config)
            [done] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=12), seeds=[3])
            found.append((done.token_ids, done.log_probs))
        assert found[0] == found[1]
        ours, theirs = (
            report_of(prepared(load(tmp_path), dtype=dtype, max_context=64)) for load in (load_stored, load_model)
        )
        assert (ours.difference, ours.noise) == (theirs.difference, theirs.noise)

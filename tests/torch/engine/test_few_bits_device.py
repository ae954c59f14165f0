"""The policy in 4 bits as its own drafter on a device: the same tokens, mostly accepted, made anew with the weights."""

import functools
from typing import Any

import pytest
import torch
from on_device import call_again
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from rlhfspec.engine import Engine, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.engine.forward import graphs, runner
from rlhfspec.engine.forward.few_bits import bytes_on_a_device
from rlhfspec.kernels.few_bit_linear import FewBitLinear
from rlhfspec.sweep.classes import tiny_config, tiny_model
from rlhfspec.tiny import ensure, perturbed, random_model

CHAIN, TREE = DraftPlan(drafter="model", depth=3), DraftPlan(drafter="model", depth=3, width=2, branch=2)
ONE = DraftPlan(drafter="model", depth=1)
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [5, 6, 7], [3, 1]]
SETTINGS = {"max_sequences": 4, "max_context": 64, "profile": False}


@functools.cache
def gpt2() -> Any:
    """Return a model whose linear layers keep their weights transposed, with biases."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=97,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=4,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config).eval()


MODELS = {
    "llama": lambda: random_model("llama", seed=0, head_dim=32),
    "tied": lambda: random_model("llama-tied", seed=0, head_dim=32),
    "gemma2": lambda: random_model("gemma2", seed=0, head_dim=32),
    "gpt2": lambda: perturbed(gpt2(), 0.0),
    "experts": lambda: tiny_model(tiny_config("deepseek_v3")),
    "too narrow": lambda: random_model("llama", seed=0),
}


def engine_on_second(model: Any, *, draft: str | None = "self", **options: Any) -> Engine:
    return make_engine(model, EngineConfig(device="second:0", **SETTINGS | options), draft=draft)


def tokens_of(engine: Engine, *, num_tokens: int = 24) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return [done.token_ids for done in engine.generate(PROMPTS, params, seeds=[1, 2, 3, 4])]


def layers_of(engine: Engine) -> list[FewBitLinear]:
    assert engine.state.few_bits is not None
    model = engine.state.few_bits.runner.parts.model
    return [module for module in model.modules() if isinstance(module, FewBitLinear)]


def numbers_of(engine: Engine) -> list[torch.Tensor]:
    return [tensor for layer in layers_of(engine) for tensor in (layer.numbers, layer.scales)]


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_drafts_for_itself_keeps_the_tokens_of_plain_decoding(second: Any, kind: str, dtype: str) -> None:
    plain = tokens_of(engine_on_second(MODELS[kind](), draft=None, dtype=dtype, speculation="off"))
    engine = engine_on_second(MODELS[kind](), dtype=dtype)
    assert bool(layers_of(engine)) is (kind != "too narrow")
    for plan in (CHAIN, TREE, "adaptive"):
        engine.set_speculation(plan)
        assert tokens_of(engine) == plain


def test_matrices_have_4_bits_and_the_head_8_and_all_else_is_shared(second: Any) -> None:
    engine = engine_on_second(MODELS["llama"]())
    layers = [module for module in engine.state.target.runner.parts.model.modules() if type(module) is nn.Linear]
    wide = [layer for layer in layers if layer.in_features % 64 == 0]
    assert len(layers) - len(wide) == 2, "the inputs of the two down_proj are no whole blocks"
    bits = {layer.out_features: layer.bits for layer in layers_of(engine)}
    assert bits.pop(97) == 8, "the head"
    assert set(bits.values()) == {4}
    assert len(layers_of(engine)) == len(wide)
    few_bits = engine.state.few_bits
    assert few_bits is not None
    held = {tensor.data_ptr() for tensor in engine.state.target.runner.fused.held()}
    assert all(tensor.data_ptr() in held for tensor in few_bits.runner.parts.model.state_dict().values())
    assert few_bits.runner.kv is engine.state.target.runner.kv


def test_a_trained_model_accepts_most_drafts_of_its_copy(second: Any) -> None:
    """The bar is that of SmolLM2-135M in 4 bits."""
    folder = ensure("sums").sums
    engine = engine_on_second(AutoModelForCausalLM.from_pretrained(folder), speculation=ONE)
    assert len(layers_of(engine)) == 15
    before = engine.stats()
    num_tokens = sum(map(len, tokens_of(engine, num_tokens=50)))
    num_verified = engine.stats().num_steps - before.num_steps
    assert num_tokens / num_verified / len(PROMPTS) > 1.8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["tied", "gpt2"])
def test_the_copy_follows_new_weights_where_it_lies(
    second: Any, kind: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rlhfspec.engine.forward.few_bits")
    new = perturbed(MODELS[kind](), 0.5, seed=3)
    state = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    engine = engine_on_second(MODELS[kind](), dtype=dtype, speculation=CHAIN)
    tokens_of(engine)
    places, before = [each.data_ptr() for each in numbers_of(engine)], [each.clone() for each in numbers_of(engine)]
    engine.load_weights(state, version=1)
    assert all(map(torch.equal, numbers_of(engine), before)), "nothing was drafted since"
    told = tokens_of(engine)
    assert ["quantised the policy" in line for line in caplog.messages] == [True]
    there_at_once = engine_on_second(new, dtype=dtype, speculation="off")
    assert [each.data_ptr() for each in numbers_of(engine)] == places, "captured graphs read them there"
    assert all(map(torch.equal, numbers_of(engine), numbers_of(there_at_once)))
    assert not any(map(torch.equal, numbers_of(engine), before))
    assert told == tokens_of(there_at_once)


def test_the_copy_has_graphs_of_its_own_in_the_memory_of_the_policys(
    second: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[Any] = []
    monkeypatch.setattr(runner, "can_capture", lambda device: True)
    monkeypatch.setattr(graphs, "CudaCapture", lambda: pools.append(call_again) or call_again)
    engine = engine_on_second(MODELS["llama"](), speculation=CHAIN, tree_slots=16, prefill_chunk=8)
    target, few_bits = engine.state.target.runner, engine.state.few_bits
    assert few_bits is not None
    own, others = few_bits.runner._graphs, target._graphs
    assert own is not None
    assert own is not others
    assert own.forward.__self__ is few_bits.runner
    assert own._captured, "before the first step"
    at_the_start = set(own._captured)
    plain = engine_on_second(MODELS["llama"](), draft=None, speculation="off")
    assert tokens_of(engine) == tokens_of(plain)
    assert set(own._captured) == at_the_start
    new = perturbed(MODELS["llama"](), 0.5, seed=3).state_dict()
    for each in (engine, plain):
        each.load_weights({name: tensor.clone() for name, tensor in new.items()}, version=1)
    assert tokens_of(engine) == tokens_of(plain)


def test_exact_mode_keeps_its_tokens_and_drafts_in_any_shape(second: Any) -> None:
    engine = engine_on_second(MODELS["llama"](), exact="on", speculation=CHAIN)
    few_bits = engine.state.few_bits
    assert few_bits is not None
    assert engine.state.target.runner.config.exact_rows
    assert not few_bits.runner.config.exact_rows
    plain = engine_on_second(MODELS["llama"](), exact="on", draft=None, speculation="off")
    assert tokens_of(engine) == tokens_of(plain)


def test_the_cache_leaves_room_for_the_copy(second: Any) -> None:
    room = {"max_sequences": 16, "max_context": 512, "prefill_chunk": 64, "speculation": "off"}
    kv, size = {}, 0
    for draft in (None, "self", "auto"):
        model = random_model("llama", seed=0, head_dim=128, num_layers=4)
        with second.limited(80 << 20):
            engine = engine_on_second(model, draft=draft, **room)
            target = engine.state.target.runner
            kv[draft] = target.kv.nbytes
            if draft == "self":
                size = sum(each.nbytes for each in numbers_of(engine))
                assert bytes_on_a_device(target.fused.model) == size
            del engine, target
    assert size > 1 << 20
    assert kv[None] - kv["self"] > 0.9 * size, "but for a part of a block"
    assert kv["auto"] == kv[None], "a copy that nobody asked for takes no room from sequences"
    assert engine_on_second(MODELS["llama"](), draft="auto").state.few_bits is not None

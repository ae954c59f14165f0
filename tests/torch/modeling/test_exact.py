"""Exactly on-policy: the trainer's log-probs are the generator's to the bit, with torch's gradients."""

import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from learners import spec
from transformers import LlamaConfig, LlamaForCausalLM
from twins.gated_mlp import gated_mlp_twin

from rlhfspec import job
from rlhfspec.engine import Engine, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.errors import InvalidRequest, UnsupportedModel
from rlhfspec.kernels import gumbel
from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.linear import PackedGatedMLP, PackedLinear, linear_twin
from rlhfspec.sweep.classes import tiny_config, tiny_model
from rlhfspec.tiny import MODEL_KINDS, random_model
from rlhfspec.training.learning.learner import Learner
from rlhfspec.training.learning.rollouts import Rollouts
from rlhfspec.training.modeling import log_probs, packed
from rlhfspec.training.modeling.exact import ExactForward, _Scratch, check_exact
from rlhfspec.training.modeling.exact_functions import exact_gated_mlp, exact_linear, stored
from rlhfspec.training.modeling.loading import prepared
from rlhfspec.training.modeling.log_probs import TokenLogProbs, TorchForward
from rlhfspec.training.modeling.lora import add_lora, merged_state
from rlhfspec.training.modeling.one_call import RowPart
from rlhfspec.training.modeling.packed import PackedRow, pack_sequences

pytestmark = [
    pytest.mark.turns(parts=2),
    pytest.mark.skipif(build.load() is None, reason=f"needs the CPU kernels: {build.unavailable_reason()}"),
]

PROMPTS = [[1, 2, 3, 4, 5], [7] * 33, [9, 8]]
CONTEXT = 96


def make_generator(model: Any, **options: Any) -> Engine:
    chosen = {"max_sequences": 4, "max_context": CONTEXT, "profile": False, "num_threads": 1} | options
    return make_engine(copy.deepcopy(model), EngineConfig(**chosen))


def make_forward(model: Any, temperature: float = 1.0, **options: Any) -> ExactForward:
    return ExactForward(prepared(copy.deepcopy(model)), temperature, max_context=CONTEXT, **options)


def generate(engine: Engine, seed: int, **params: Any) -> tuple[PackedRow, torch.Tensor, torch.Tensor]:
    chosen = SamplingParams(**({"max_tokens": 20, "ignore_eos": True} | params))
    done = engine.generate(PROMPTS, chosen, seeds=[seed, seed + 1, seed + 2])
    untempered = torch.tensor([number for one in done for number in one.log_probs])
    tempered = torch.tensor([number for one in done for number in one.tempered_log_probs])
    return pack_sequences(PROMPTS, [one.token_ids for one in done]), untempered, tempered


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.detach() - theirs).abs().max())


@pytest.mark.sweep(parts=4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_the_trainers_log_probs_are_the_generators_at_every_step(kind: str, dtype: str) -> None:
    model, temperature = random_model(kind, seed=3), 0.7
    speculation = "adaptive" if dtype == "float32" else "suffix"
    engine = make_generator(model, dtype=dtype, speculation=speculation)
    forward = make_forward(model, temperature, dtype=dtype)
    optimizer = torch.optim.AdamW(forward.model.parameters(), lr=3e-3)
    for step in range(3):
        if step:
            engine.load_weights(forward.model.state_dict(), version=step)
        batch, untempered, tempered = generate(engine, 5 * step, temperature=temperature)
        found = forward(batch)
        worst = max(difference(found.log_probs, tempered), difference(found.untempered, untempered))
        print(f"{kind} {dtype} step {step}: largest difference {worst}")
        assert worst == 0.0
        (-found.log_probs.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_low_rank_updates_are_exact_too(dtype: str) -> None:
    model = random_model("qwen2", seed=4)
    policy = prepared(copy.deepcopy(model))
    add_lora(policy, job.Lora(rank=2), seed=0)
    engine, forward = make_generator(model, dtype=dtype), ExactForward(policy, 1.0, max_context=CONTEXT, dtype=dtype)
    optimizer = torch.optim.SGD([tensor for tensor in policy.parameters() if tensor.requires_grad], lr=0.05)
    seen = []
    for step in range(3):
        if step:
            engine.load_weights(merged_state(policy.state_dict(), scaling=8.0), version=step)
        batch, untempered, _ = generate(engine, step)
        found = forward(batch)
        assert difference(found.log_probs, untempered) == 0.0
        seen.append(found.log_probs.detach())
        (-found.log_probs.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learner_reports_a_difference_of_zero_and_learns_like_the_plain_one(dtype: str) -> None:
    model = random_model("llama", seed=3)
    specs = {exact: spec(exactOnPolicy=exact, generation={"dtype": dtype}) for exact in (True, False)}
    learners = {name: Learner(each, prepared(copy.deepcopy(model)), num_threads=1) for name, each in specs.items()}
    engine, norms = make_generator(model, dtype=dtype), {}
    for step in range(3):
        if step:
            engine.load_weights(learners[True].policy_state(), version=step)
        rollouts = make_rollouts(*generate(engine, 3 * step, temperature=0.9), version=step)
        for exact, learner in learners.items():
            metrics = learner.learn(rollouts).metrics
            norms[exact] = metrics["grad_norm"]
            assert (metrics["log_prob_difference_max"] == 0.0) is exact
    if dtype == "float32":
        assert norms[True] == pytest.approx(norms[False], rel=1e-3)


def make_rollouts(batch: PackedRow, untempered: torch.Tensor, tempered: torch.Tensor, *, version: int) -> Rollouts:
    lengths = torch.tensor([20, 20, 20])
    return Rollouts(
        ids=("j/1/0/0", "j/1/0/1", "j/1/0/2"),
        group_index=torch.zeros(3, dtype=torch.int64),
        lengths=lengths,
        prompt_token_ids=tuple(tuple(prompt) for prompt in PROMPTS),
        token_ids=batch.targets,
        generator_log_probs=tempered,
        log_probs=untempered,
        weights_versions=torch.full((60,), version),
        rewards=torch.tensor([1.0, 0.0, -0.5], dtype=torch.float64),
        reward_components={},
        reference_log_probs=tempered - 0.01,
        values=None,
        truncated=torch.ones(3, dtype=torch.bool),
    )


def test_masked_sampling_is_compared_without_its_masks() -> None:
    model = random_model("llama", seed=6)
    batch, untempered, tempered = generate(make_generator(model), 1, temperature=0.8, top_k=5, top_p=0.9)
    found = make_forward(model, 0.8)(batch)
    assert difference(found.untempered, untempered) == 0.0
    assert difference(found.log_probs, tempered) > 1e-3


@functools.cache
def one_by_one(kind: str) -> tuple[ExactForward, list[tuple[list[int], list[int]]], list[torch.Tensor]]:
    forward = make_forward(random_model(kind, seed=8), 0.9)
    draw = np.random.default_rng(0)
    sizes = [(1, 1), (1, 30), (17, 2), (33, 33), (5, 16), (16, 40)]
    samples = [(draw.integers(3, 90, a).tolist(), draw.integers(3, 90, b).tolist()) for a, b in sizes]
    with torch.no_grad():
        return forward, samples, [forward(pack_sequences([p], [r])).log_probs for p, r in samples]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt-neox"])
@settings(max_examples=12)
@given(order=st.permutations(range(6)), count=st.integers(1, 6), num_threads=st.sampled_from([1, 2]))
def test_packing_changes_no_bit(kind: str, order: list[int], count: int, num_threads: int) -> None:
    forward, samples, alone = one_by_one(kind)
    chosen = order[:count]
    build.set_num_threads(num_threads)
    try:
        with torch.no_grad():
            together = forward(pack_sequences(*zip(*(samples[place] for place in chosen), strict=True)))
    finally:
        build.set_num_threads(None)
    assert torch.equal(together.log_probs, torch.cat([alone[place] for place in chosen]))


@pytest.mark.parametrize("layer", ["o_proj", "mlp", "input_layernorm"])
def test_the_comparison_detects_one_layer_in_torch_arithmetic(layer: str) -> None:
    """One layer of many in torch's arithmetic must make the comparison fail."""
    model = wider_model()
    batch, untempered, _ = generate(make_generator(model), 1)
    forward = make_forward(model)
    assert difference(forward(batch).untempered, untempered) == 0.0
    del forward.model.get_submodule(f"model.layers.0.{'self_attn.' if layer == 'o_proj' else ''}{layer}").forward
    assert 0.0 < difference(forward(batch).untempered, untempered) < 1e-4


def wider_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=320, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, initializer_range=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_weights_are_packed_again_whenever_they_change() -> None:
    forward, batch = make_forward(random_model("llama", seed=3)), pack_sequences([(5, 6)], [(7, 8, 9)])
    before = forward(batch).untempered
    weight = forward.model.lm_head.weight
    with torch.no_grad():
        weight.mul_(1.5)  # counted by torch
    counted = forward(batch).untempered
    weight.data.mul_(1.5)  # not counted: this must be said
    forward.weights_changed()
    assert not torch.equal(before, counted)
    assert not torch.equal(counted, forward(batch).untempered)


def assert_same_gradients(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    found = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        assert (parameter.grad is None) == (found[name].grad is None), name
        if parameter.grad is not None:
            error = (found[name].grad - parameter.grad).abs().max() / parameter.grad.abs().max().clamp_min(1e-6)
            assert error < tolerance, (name, float(error))


def weighted(found: TokenLogProbs) -> torch.Tensor:
    return (found.log_probs * torch.linspace(-1, 1, len(found.log_probs))).sum() - 0.1 * found.entropy.sum()


def some_batch() -> PackedRow:
    draw = np.random.default_rng(1)
    return pack_sequences(PROMPTS, [draw.integers(3, 90, size).tolist() for size in (12, 1, 30)])


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_gradients_of_every_parameter_are_torchs(kind: str) -> None:
    model = random_model(kind, seed=5)
    exact, plain = make_forward(model, 0.8), TorchForward(prepared(copy.deepcopy(model)), 0.8)
    for forward in (exact, plain):
        weighted(forward(some_batch(), entropy_gradient=True)).backward()
    assert_same_gradients(exact.model, plain.model)


def test_gradients_of_low_rank_updates_are_torchs() -> None:
    model = random_model("qwen3", seed=5)
    policies = [prepared(copy.deepcopy(model)) for _ in range(2)]
    for policy in policies:
        add_lora(policy, job.Lora(rank=2), seed=1)
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:  # zero at first, and then A has no gradient
                parameter.data.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).reshape(parameter.shape))
    exact, plain = ExactForward(policies[0], 1.0, max_context=CONTEXT), TorchForward(policies[1], 1.0)
    for forward in (exact, plain):
        weighted(forward(some_batch(), entropy_gradient=True)).backward()
    assert_same_gradients(exact.model, plain.model)


@pytest.mark.parametrize("kind", ["llama", "phi", "gemma"])
def test_bfloat16_gradients_go_straight_through_to_the_float32_parameters(kind: str) -> None:
    """A torch model with rounded parameters has the same gradients."""
    exact = make_forward(model := random_model(kind, seed=5), dtype="bfloat16", arithmetic="fma")
    keep_keys_as(exact, torch.float32)  # rounded keys differ where torch's are hardly different before
    rounded = prepared(copy.deepcopy(model))
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    plain = TorchForward(rounded, 1.0)
    for forward in (exact, plain):
        weighted(forward(some_batch(), entropy_gradient=True)).backward()
    assert_same_gradients(exact.model, plain.model)


def keep_keys_as(forward: ExactForward, dtype: torch.dtype) -> None:
    forward._cache = _Scratch(dtype, forward._cache.heads, forward._cache.dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "softcap", "with_sinks"), [(None, 0.0, False), (5, 0.0, False), (4, 3.0, True)])
def test_attention_backward_is_right(dtype: torch.dtype, window: int | None, softcap: float, with_sinks: bool) -> None:
    forward = make_forward(random_model("qwen3", seed=0))
    parts = (RowPart(9), RowPart(1, 0), RowPart(20, 0), RowPart(7))
    keep_keys_as(forward, dtype)
    spec = dataclasses.replace(forward.parts.anatomy.attentions[0], window=window)
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, 37, 16, requires_grad=True) for heads in (4, 2, 2)]
    sinks = torch.randn(4, requires_grad=True) if with_sinks else None
    forward.parts.anatomy = dataclasses.replace(forward.parts.anatomy, attentions=(spec,))
    with forward._laid_out(parts):
        ours = forward.attention(*inputs, 0.25, softcap, sinks)
    query, key, value = inputs
    packed.keep_spec(module := torch.nn.Identity(), spec)
    with packed.forward_layout(parts):
        theirs, _ = packed.attend(
            module, query, stored(key, dtype), stored(value, dtype), None, scaling=0.25, softcap=softcap, s_aux=sinks,
        )  # fmt: skip
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    leaves = inputs if sinks is None else [*inputs, sinks]
    slope = torch.randn(ours.shape)
    for one, other in zip(*(torch.autograd.grad(out, leaves, slope) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_have_the_gradients_of_their_twins(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(a, b, bias=bias) for a, b in ((9, 21), (9, 21), (21, 7))]
    weights, biases = [layer.weight for layer in layers], tuple(layer.bias for layer in layers)
    linear = PackedLinear.from_linear(layers[0], dtype=dtype, arithmetic="fma")
    mlp = PackedGatedMLP.from_linears(*layers, activation="silu", dtype=dtype, arithmetic="fma")
    x = torch.randn(2, 5, 9, requires_grad=True)
    exact_linear(x, weights[0], biases[0], linear).square().sum().backward()
    if not bias:
        exact_gated_mlp(x, (weights[0], weights[1], weights[2]), biases, mlp).square().sum().backward()
    ours = [tensor.grad.clone() for tensor in (x, *weights) if tensor.grad is not None]
    for tensor in (x, *weights, *(one for one in biases if one is not None)):
        tensor.grad = None
    kept = [stored(weight, dtype) for weight in weights]
    linear_twin(x, kept[0], biases[0], "fma").square().sum().backward()
    if not bias:
        gated_mlp_twin(x, kept[0], kept[1], kept[2], "silu", "fma").square().sum().backward()
    for one, other in zip(ours, [tensor.grad for tensor in (x, *weights) if tensor.grad is not None], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_large_vocabulary_in_parts_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama", seed=5)
    whole, parts = make_forward(model), make_forward(model)
    weighted(whole(some_batch(), entropy_gradient=True)).backward()
    monkeypatch.setattr(log_probs, "LOGITS_ON_A_CPU", 97 * 5)
    found = parts(some_batch(), entropy_gradient=True)
    weighted(found).backward()
    assert torch.equal(found.log_probs, whole(some_batch()).log_probs)
    assert_same_gradients(parts.model, whole.model)


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.9])
@pytest.mark.parametrize("vocab_size", [1, 2, 97, 4099])
def test_a_given_tokens_log_prob_has_the_bits_of_sampling_it(vocab_size: int, temperature: float) -> None:
    rows = 17
    logits = 4 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0))
    logits[3] = torch.nan
    drawn = gumbel.sample(
        logits, np.arange(rows), np.zeros(rows, np.int32), np.full(rows, temperature, np.float32),
        np.zeros(rows, np.int32), np.ones(rows, np.float32),
    )  # fmt: skip
    tempered = gumbel.token_log_probs(logits, drawn.tokens, temperature)
    torch.testing.assert_close(tempered, drawn.tempered_log_probs, rtol=0, atol=0, equal_nan=True)
    untempered = gumbel.token_log_probs(logits, drawn.tokens, 1.0)
    torch.testing.assert_close(untempered, drawn.log_probs, rtol=0, atol=0, equal_nan=True)
    twin = gumbel.token_log_probs_reference(logits, drawn.tokens, torch.full((rows,), temperature))
    torch.testing.assert_close(tempered, twin, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(("tokens", "temperature"), [([0, 5], 1.0), ([-1, 0], 1.0), ([0, 0], 0.0), ([0], 1.0)])
def test_impossible_tokens_and_temperatures_are_refused(tokens: list[int], temperature: float) -> None:
    with pytest.raises(ValueError, match=r"tokens|temperature"):
        gumbel.token_log_probs(torch.zeros(2, 5), np.array(tokens, np.int32), temperature)


@pytest.mark.parametrize(
    ("training", "model", "field"),
    [
        ({"autocast": "bfloat16"}, {}, "training.autocast"),
        ({}, {"lora": {"dropout": 0.1}}, "model.lora.dropout"),
        ({}, {"dtype": "bfloat16"}, "model.dtype"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(training: Any, model: Any, field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: .*with training.exactOnPolicy"):
        check_exact(spec(model=model, exactOnPolicy=True, **training))
    check_exact(spec(model=model, **training))
    check_exact(spec(exactOnPolicy=True))


def test_dropout_of_an_update_is_refused_where_it_is_found() -> None:
    policy = prepared(random_model("llama", seed=0))
    add_lora(policy, job.Lora(rank=2, dropout=0.1), seed=0)
    with pytest.raises(InvalidRequest, match=r"^model\.lora\.dropout"):
        ExactForward(policy, 1.0, max_context=CONTEXT)


def test_autocast_around_the_forward_is_refused() -> None:
    forward = make_forward(random_model("llama", seed=0))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InvalidRequest, match=r"^training\.autocast"):
        forward(some_batch())


def test_parameters_in_bfloat16_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^model\.dtype"):
        ExactForward(prepared(random_model("llama", seed=0), dtype="bfloat16"), 1.0, max_context=CONTEXT)


def test_a_function_whose_bits_depend_on_the_company_is_refused_by_name() -> None:
    """sinh's last bit depends on the element's place, and no kernel replaces it."""
    model = random_model("llama", seed=0)
    model.model.layers[1].mlp.act_fn = Sinh()
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.mlp\.act_fn: torch's sinh .* other bits"):
        ExactForward(prepared(model), 1.0, max_context=64)


class Sinh(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-1, 1).sinh()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    build.set_num_threads(1)
    yield
    build.set_num_threads(None)


@pytest.mark.parametrize(("dtype", "is_possible"), [("float32", True), ("bfloat16", False)])
def test_vectors_read_by_other_code_than_their_modules_are_refused_in_bfloat16(dtype: str, is_possible: bool) -> None:
    """JetMoe's expert bias is added by the surrounding module, so it would not be rounded."""
    model = prepared(tiny_model(tiny_config("jetmoe")), max_context=64)
    if is_possible:
        ExactForward(model, 1.0, max_context=64, dtype=dtype)
        return
    with pytest.raises(UnsupportedModel, match=r"experts\.bias is read by code outside of its module"):
        ExactForward(model, 1.0, max_context=64, dtype=dtype)


def test_modules_that_do_not_run_are_not_checked() -> None:
    ExactForward(prepared(tiny_model(tiny_config("whisper")), max_context=64), 1.0, max_context=64, dtype="bfloat16")

"""Packed forwards equal plain Hugging Face and the engine; critic, LoRA and digests."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import attention_spec
from safetensors.torch import load_file, save_file

from rlhfspec import job
from rlhfspec.common.ranks.group import Ranks
from rlhfspec.errors import InvalidRequest, UnsupportedModel
from rlhfspec.huggingface.structure.attention import visible
from rlhfspec.sweep.classes import tiny_config, tiny_model
from rlhfspec.tiny import MODEL_KINDS, random_model
from rlhfspec.training.modeling import log_probs as log_probs_module, lora
from rlhfspec.training.modeling.critic import load_critic
from rlhfspec.training.modeling.digest import digest
from rlhfspec.training.modeling.loading import load_policy, load_reference, prepared
from rlhfspec.training.modeling.log_probs import TokenLogProbs, TorchForward, entropy_of
from rlhfspec.training.modeling.packed import PackedRow, _sdpa, attend, explicit_attention, pack_sequences
from rlhfspec.training.modeling.stored import Piece, StoredTensor
from rlhfspec.training.modeling.tensor_parallel import cut, shares_of

PROMPTS = [(5,), (6, 7, 8), (9, 10, 11, 12, 13), (2, 3)]
RESPONSES = [
    tuple(torch.randint(97, (size,), generator=torch.Generator().manual_seed(size)).tolist()) for size in (3, 1, 20, 11)
]


def batch() -> PackedRow:
    return pack_sequences(PROMPTS, RESPONSES)


def one_by_one(model: Any, temperature: float) -> torch.Tensor:
    model.set_attn_implementation("eager")
    found = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        logits = model(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0].float() / temperature
        found.append(logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("kind", [*MODEL_KINDS, "gpt2"])
def test_packed_log_probs_and_gradients_are_those_of_single_sequences(kind: str) -> None:
    """Rotary positions are relative, so only GPT-2's learned ones distinguish row from sequence."""
    plain = tiny_model(tiny_config("gpt2")) if kind == "gpt2" else random_model(kind, seed=1)
    plain.requires_grad_(True)
    model = prepared(copy.deepcopy(plain))
    expected = one_by_one(plain, 0.7)
    found = TorchForward(model, 0.7)(batch())
    assert torch.allclose(found.log_probs, expected, rtol=1e-6, atol=1e-5)  # log-probs down to -20 round too
    assert torch.allclose(found.untempered, one_by_one(plain, 1.0), rtol=1e-6, atol=1e-5)
    factors = torch.linspace(-1, 1, len(expected))
    (expected * factors).sum().backward()
    (found.log_probs * factors).sum().backward()
    theirs = {name: parameter.grad for name, parameter in plain.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in theirs.values() if gradient is not None)
    for name, parameter in model.named_parameters():
        assert (parameter.grad - theirs[name]).abs().max() < 1e-5 * largest, name


def test_logits_computed_in_parts_give_the_same_log_probs_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TorchForward(model := prepared(random_model("qwen2", seed=3)), 0.9)

    def run() -> tuple[TokenLogProbs, torch.Tensor]:
        model.zero_grad()
        out = forward(batch(), entropy_gradient=True)
        (out.log_probs.sum() + out.entropy.square().sum()).backward()
        return out, model.lm_head.weight.grad.clone()

    at_once, gradient = run()
    monkeypatch.setattr(log_probs_module, "LOGITS_ON_A_CPU", 97 * 4)
    in_parts, gradient_in_parts = run()
    for field in ("log_probs", "untempered", "entropy"):
        assert torch.allclose(getattr(at_once, field), getattr(in_parts, field), atol=1e-5)
    assert torch.allclose(gradient, gradient_in_parts, rtol=1e-4, atol=1e-4)


def test_entropy_carries_a_gradient_only_when_asked() -> None:
    forward = TorchForward(prepared(random_model("llama", seed=1)), 1.0)
    assert not forward(batch()).entropy.requires_grad
    assert forward(batch(), entropy_gradient=True).entropy.requires_grad
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(entropy_of(logits.log_softmax(-1)), torch.distributions.Categorical(logits=logits).entropy())


def test_log_probs_are_float32_under_autocast() -> None:
    forward = TorchForward(prepared(random_model("llama", seed=1)), 1.0)
    exact = forward(batch()).log_probs
    with torch.autocast("cpu", torch.bfloat16):
        rounded = forward(batch()).log_probs
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.5


def test_a_query_sees_its_window_or_its_chunk() -> None:
    device = torch.device("cpu")
    assert visible(3, attention_spec(window=2), device).int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert visible(4, attention_spec(chunk=3), device).int().tolist()[-1] == [0, 0, 0, 1]


@pytest.mark.parametrize("window", [None, 3])
def test_fused_attention_equals_the_written_out_one(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 9, 8, generator=generator)
    key, value = (torch.randn(1, 2, 9, 8, generator=generator) for _ in range(2))
    spec = attention_spec(window=window)
    slow = explicit_attention(query, key, value, 0.3, spec, 0.0, None)
    assert torch.allclose(_sdpa(query, key, value, 0.3, spec), slow, atol=1e-6)


def test_attention_sinks_take_their_share_of_the_softmax() -> None:
    value = torch.ones(1, 2, 4, 8)
    query = key = torch.zeros(1, 2, 4, 8)
    out = explicit_attention(query, key, value, 1.0, attention_spec(), 0.0, torch.zeros(2))
    assert torch.allclose(out[0, 0, :, 0], torch.tensor([1 / 2, 2 / 3, 3 / 4, 4 / 5]))


def test_an_unknown_argument_of_attention_is_refused() -> None:
    tensor = torch.zeros(1, 1, 1, 8)
    with pytest.raises(UnsupportedModel, match="position_bias"):
        attend(torch.nn.Identity(), tensor, tensor, tensor, None, position_bias=tensor)


def test_a_packed_model_refuses_rows_without_a_layout() -> None:
    model = prepared(random_model("llama", seed=1))
    with pytest.raises(AssertionError, match="forward_layout"):
        model(torch.tensor([[1, 2, 3]]))


def test_a_model_that_changes_its_logits_in_a_hook_is_refused() -> None:
    model = random_model("llama", seed=1)

    def shift(module: Any, given: Any, out: Any) -> None:
        out.logits += out.logits.cos()

    model.register_forward_hook(shift)
    with pytest.raises(UnsupportedModel, match="differ"):
        prepared(model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "llama"
    random_model("llama", seed=4).save_pretrained(path)
    return str(path)


def test_policy_and_reference_begin_with_the_same_weights(folder: str) -> None:
    policy, reference = load_policy(job.Model(path=folder)), load_reference(job.Model(path=folder))
    assert digest(policy.state_dict()) == digest(reference.state_dict())
    assert all(parameter.requires_grad for parameter in policy.parameters())
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert load_policy(job.Model(path=folder, dtype="bfloat16")).dtype == torch.bfloat16


@pytest.mark.parametrize(("field", "load"), [("reference", load_reference), ("critic", load_critic)])
def test_a_missing_folder_is_named_by_its_field(folder: str, field: str, load: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"model\.{field}: no such folder"):
        load(job.Model.model_validate({"path": folder, field: "/nowhere/at/all"}))


def test_a_critic_begins_at_zero_and_survives_its_folder(folder: str, tmp_path: Path) -> None:
    critic = load_critic(job.Model(path=folder))
    assert torch.equal(critic(batch()), torch.zeros(35))
    with torch.no_grad():
        critic.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    critic.save(tmp_path / "critic")
    again = load_critic(job.Model(path=folder, critic=str(tmp_path / "critic")))
    assert digest(again.state_dict()) == digest(critic.state_dict())
    assert torch.equal(again(batch()), critic(batch()))


def test_values_are_of_the_state_before_the_token(folder: str) -> None:
    critic = load_critic(job.Model(path=folder))
    with torch.no_grad():
        critic.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    values = critic(pack_sequences([(5, 6)], [(7, 8)]))
    with_other_token = critic(pack_sequences([(5, 6)], [(9, 8)]))
    assert values[0] == with_other_token[0]
    assert values[1] != with_other_token[1]
    assert torch.allclose(values[1], critic(pack_sequences([(5, 6, 7)], [(1,)]))[0], atol=1e-6)


def test_a_damaged_critic_folder_is_named(folder: str, tmp_path: Path) -> None:
    load_critic(job.Model(path=folder)).save(tmp_path)
    config, file = tmp_path / "config.json", tmp_path / "critic.safetensors"
    right, tensors = json.loads(config.read_text()), load_file(file)

    def refused(reason: str) -> None:
        with pytest.raises(InvalidRequest, match=rf"model\.critic: {reason}"):
            load_critic(job.Model(path=folder, critic=str(tmp_path)))

    config.write_text(json.dumps(right | {"hidden_size": 56, "head_dim": 14}))
    refused("is not a loadable critic: size mismatch for score")
    config.write_text("[1]")
    refused("is not a loadable critic")
    config.write_text(json.dumps(right))
    save_file({name: tensor for name, tensor in tensors.items() if "norm" not in name}, file)
    refused(r"its checkpoint lacks \d+ weights: trunk\.layers\.0")
    file.write_bytes(file.read_bytes()[:-10])
    refused("is not a loadable critic: Error while")


def test_lora_begins_as_the_base_and_merges_into_plain_names() -> None:
    plain = prepared(random_model("qwen2", seed=5))
    names, before = list(plain.state_dict()), TorchForward(plain, 1.0)(batch()).log_probs.detach()
    lora.add_lora(plain, job.Lora(rank=3, alpha=12.0), seed=7)
    forward = TorchForward(plain, 1.0)
    assert torch.equal(forward(batch()).log_probs, before)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
    changed = forward(batch()).log_probs
    assert (changed - before).abs().max() > 0.1
    merged = lora.merged_state(plain.state_dict(), 12.0 / 3)
    assert list(merged) == names
    fresh = prepared(random_model("qwen2", seed=6))
    fresh.load_state_dict(merged)
    assert (TorchForward(fresh, 1.0)(batch()).log_probs - changed).abs().max() < 1e-4


def test_lora_trains_the_update_only_and_draws_it_from_the_seed() -> None:
    first, second, other = (prepared(random_model("llama", seed=5)) for _ in range(3))
    for model, seed in ((first, 7), (second, 7), (other, 8)):
        lora.add_lora(model, job.Lora(targetModules=["q_proj", "v_proj"]), seed=seed)
    trained = [name for name, parameter in first.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name and ("q_proj" in name or "v_proj" in name) for name in trained)
    assert digest(first.state_dict()) == digest(second.state_dict()) != digest(other.state_dict())
    assert sorted(lora.adapters(first.state_dict())) == sorted(trained)


def test_lora_on_layers_that_are_not_there_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"model\.lora\.targetModules"):
        lora.add_lora(prepared(random_model("llama", seed=5)), job.Lora(targetModules=["nothing"]), seed=0)


def test_a_digest_is_of_names_types_shapes_and_bytes() -> None:
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    others: list[dict[str, torch.Tensor]] = [
        {"a": weights["a"], "c": weights["b"]},
        {"a": weights["a"].view(3, 2), "b": weights["b"]},
        {"a": weights["a"], "b": weights["b"].view(torch.int16)},
        {"a": weights["a"] + 1e-7, "b": weights["b"]},
        {"a": weights["a"]},
    ]
    assert len({digest(weights), *map(digest, others)}) == 6
    assert digest(weights) == digest({"b": weights["b"], "a": weights["a"].t().contiguous().t()})
    assert digest({"a": torch.tensor(0.0)}) != digest({"a": torch.tensor(-0.0)})


SECOND = Ranks(rank=1, num_ranks=2)


def test_cutting_takes_heads_and_rows_and_keeps_tied_weights_tied() -> None:
    model, whole = random_model("llama-tied", seed=0), random_model("llama-tied", seed=0).state_dict()
    cut(model, SECOND, field="model")
    assert model.lm_head.weight is model.get_input_embeddings().weight
    shares = shares_of(model)
    for name, tensor in model.state_dict().items():
        share = shares.get(name)
        if share is not None:
            whole[name] = whole[name].narrow(share.dim, share.start, share.stop - share.start)
        assert torch.equal(tensor, whole[name]), name
    assert {name.rpartition("layers.0.")[2] for name in whole.keys() - shares.keys() if "layers.1" not in name} == {
        "input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "num_ranks", "said"),
    [
        ("phi3", 2, "cannot be cut over 2 processes: Phi3ForCausalLM needs"),
        ("llama", 4, "cannot be cut over 4 processes: num_key_value_heads is 2"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_and_left_whole(kind: str, num_ranks: int, said: str) -> None:
    model = random_model(kind, seed=0)
    with pytest.raises(InvalidRequest, match=said):
        cut(model, Ranks(rank=1, num_ranks=num_ranks), field="spec.model.path")
    assert not shares_of(model)
    assert sum(map(torch.numel, model.parameters())) == sum(map(torch.numel, random_model(kind, seed=0).parameters()))


def test_a_missing_piece_of_a_stored_tensor_is_found(tmp_path: Path) -> None:
    quarters = [Piece(path=tmp_path, start=(row, column), shape=(2, 3)) for row in (0, 2) for column in (0, 3)]
    for missing, place in enumerate(((0, 0), (0, 3), (2, 0), (2, 3))):
        kept = tuple(piece for number, piece in enumerate(quarters) if number != missing)
        assert StoredTensor(name="weight", shape=(4, 6), pieces=kept).missing() == place
    assert StoredTensor(name="weight", shape=(4, 6), pieces=tuple(quarters)).missing() is None

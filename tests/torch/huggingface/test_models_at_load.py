"""Findings, questions and refusals at load depend on what a model does, never on names."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhfspec import job
from rlhfspec.engine import Engine, Request, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.errors import InvalidRequest, SequenceStateError, UnsupportedModel
from rlhfspec.huggingface.loading import load_model
from rlhfspec.huggingface.proof.probes import Probe, choose
from rlhfspec.huggingface.proof.reference import ProbeResult, Reference
from rlhfspec.huggingface.structure.anatomy import examine
from rlhfspec.huggingface.structure.attention import use_eager_experts
from rlhfspec.huggingface.structure.causal_lm import Anatomy
from rlhfspec.kernels.linear import arithmetic_for
from rlhfspec.sweep.classes import tiny_config, tiny_model
from rlhfspec.sweep.verdict import judge
from rlhfspec.sweep.ways import one_by_one
from rlhfspec.tiny import perturbed, random_model
from rlhfspec.training.modeling.critic import load_critic
from rlhfspec.training.modeling.loading import load_policy, load_reference

pytestmark = pytest.mark.turns(parts=2)

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
REQUEST = Request(id="a", prompt_token_ids=(5, 6, 7), params=PARAMS, seed=1)


def anatomy_of(model_type: str, max_context: int = 128, **changes: Any) -> Anatomy:
    return examine(tiny_model(tiny_config(model_type, **changes)), name="model", max_context=max_context)


def engine_of(model: Any, *, draft: Any = None, **options: Any) -> Engine:
    usual = {"max_sequences": 2, "max_context": 64, "profile": False, "num_threads": 1, "speculation": "off"}
    return make_engine(model, EngineConfig(**(usual | options)), draft=draft)


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("window", [1, 2, 3, 11, 12, 13, 24, 63, 64, 100, 127, 128])
def test_sliding_windows_are_found_whatever_the_module_calls_them(window: int) -> None:
    found = [spec.window for spec in anatomy_of("mistral", sliding_window=window).attentions]
    assert found == [window if window < 128 else None] * 4


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("chunk", [2, 3, 13, 24, 40, 63])
def test_attention_chunks_are_found(chunk: int) -> None:
    layers = ["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"]
    found = anatomy_of("llama4_text", attention_chunk_size=chunk, layer_types=layers).attentions
    assert [(spec.window, spec.chunk) for spec in found] == [(None, chunk)] * 3 + [(None, None)]


def test_scale_soft_cap_sinks_and_sizes_are_those_passed_to_attention() -> None:
    [gemma, *_] = anatomy_of("gemma2", query_pre_attn_scalar=23, attn_logit_softcapping=1.5).attentions
    assert (gemma.scale, gemma.softcap, gemma.has_sinks) == (23**-0.5, 1.5, False)
    assert all(spec.has_sinks for spec in anatomy_of("gpt_oss").attentions)
    [latent, *_] = anatomy_of("deepseek_v3").attentions
    assert (latent.key_dim, latent.value_dim) == (20, 16), "keys with a rotary part, values without"


def test_an_attention_that_runs_twice_a_layer_has_two_places_in_the_cache() -> None:
    for kind in ("diffllama", "longcat_flash"):
        assert [spec.index for spec in anatomy_of(kind).attentions] == list(range(8)), "of 4 layers"


def test_the_trunk_and_what_it_returns_are_found() -> None:
    assert [anatomy_of(kind).trunk for kind in ("llama", "gpt2", "opt")] == ["model", "transformer", "model.decoder"]


def probed(model_type: str, max_context: int, **changes: Any) -> list[tuple[int, int]]:
    model = tiny_model(tiny_config(model_type, **changes))
    anatomy = examine(model, name="model", max_context=max_context)
    return [(probe.past, probe.length - 1) for probe in choose(anatomy, model.config, max_context, 97)]


def test_probes_lie_behind_windows_and_original_lengths_and_at_the_end() -> None:
    window = probed("mistral", 512, sliding_window=200)
    assert any(first < 200 <= last for first, last in window)
    assert max(last for _, last in window) == 511
    yarn = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert any(first < 64 <= last for first, last in probed("llama", 512, rope_parameters=yarn))
    assert any(first < 24 <= last for first, last in probed("llama4_text", 512, attention_chunk_size=24))


def test_probes_never_leave_the_context() -> None:
    for max_context in (2, 5, 9, 20, 33, 34):
        assert all(0 <= last < max_context for _, last in probed("mistral", max_context, sliding_window=7))


def test_a_far_probe_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of 131,072 positions costs as few tokens as that of 4,096."""
    look_up, looked_up = torch.nn.functional.embedding, 0

    def counted(tokens: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal looked_up
        looked_up += tokens.numel()
        return look_up(tokens, *arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "embedding", counted)
    num_tokens = []
    for max_context in (4096, 131072):
        looked_up = 0
        config = tiny_config("llama", max_position_embeddings=max_context)
        report = engine_of(tiny_model(config), max_context=max_context, max_sequences=1).reports["model"]
        assert report.probes[-1] == f"9 tokens behind {max_context - 9} positions"
        num_tokens.append(looked_up)
    near, far = num_tokens
    assert 9 < far == near < 1000, "of all probes, some of which are asked several times"


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 0.02)])
@pytest.mark.parametrize("num_layers", [1, 24])
def test_noise_is_what_rounding_does_and_the_engine_is_no_further(dtype: str, most: float, num_layers: int) -> None:
    """For bfloat16 more is allowed only on processors whose products round inputs."""
    rounds_rows = dtype == "bfloat16" and arithmetic_for(torch.bfloat16) in ("amx", "dpbf16")
    least = 1e-4 if rounds_rows else 1e-7
    report = engine_of(tiny_model(tiny_config("llama", num_hidden_layers=num_layers)), dtype=dtype).reports["model"]
    assert least < report.noise < most
    assert report.difference < 4 * report.noise


def test_a_difference_is_refused_where_rounding_cannot_explain_it() -> None:
    probe, logits = Probe(0, (1, 2)), torch.tensor([[10.0, 0.0], [3.0, 5.0]])
    reference = Reference("Odd", "model", (probe,), (ProbeResult(logits, []),), noise=2e-5)

    def check(difference: float) -> float:
        found = logits + torch.tensor([[0.0, 0.0], [0.0, 10 * difference]])
        return reference.check([ProbeResult(found, [])], 1e-5, whose="the engine's")

    assert check(7e-5) == pytest.approx(7e-5, rel=0.01)
    said = r"by 9\.0e-05 of their size on 2 tokens; rounding moves them by 2\.0e-05"
    with pytest.raises(UnsupportedModel, match=said):
        check(9e-5)
    with pytest.raises(UnsupportedModel, match="by inf"):
        check(float("nan"))


@pytest.mark.parametrize(
    ("model_type", "changes", "problem"),
    [
        ("mamba", {}, "mixes tokens outside of AttentionInterface"),
        ("bloom", {}, "takes positions from the order of tokens"),
        ("bart", {}, "takes positions from the order of tokens"),
        ("deepseek_v32", {}, r"passes attention arguments \['indices'\]"),
        ("deepseek_v4", {}, "attends with 12 queries to 15 keys where there are 12 tokens"),
        ("doge", {}, "adds a bias to attention scores through the mask"),
        ("bert", {"is_decoder": False}, "attention is not causal"),
        ("llama4_text", {"floor_scale": 16}, "self_attn takes positions from the order of tokens"),
        ("gptj", {}, "mixes tokens outside of AttentionInterface"),
    ],
)
def test_refusals_name_the_feature(model_type: str, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnsupportedModel, match=problem):
        anatomy_of(model_type, **changes)


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rope_that_depends_on_the_length_runs_within_its_original_length(kind: str) -> None:
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
    extra = factors | {"original_max_position_embeddings": 64} if kind == "longrope" else {}
    rope = ROPE | {"rope_type": kind, "factor": 4.0} | extra
    changes = {"rope_parameters": rope, "max_position_embeddings": 256 if kind == "longrope" else 64}
    config = partial(tiny_config, "llama", **changes)
    assert judge(lambda: tiny_model(config()), max_context=64).kind == "right"
    with pytest.raises(UnsupportedModel, match=rf"depend on the length of the sequence \({kind}\).* may have 100"):
        examine(tiny_model(config()), name="model", max_context=100)


def test_the_drafter_is_called_drafter() -> None:
    with pytest.raises(UnsupportedModel, match=r"^drafter: "):
        engine_of(random_model("llama", seed=0), draft=tiny_model(tiny_config("mamba")))
    config = tiny_config("llama", max_position_embeddings=32)
    with pytest.raises(InvalidRequest, match=r"^drafter: has fewer positions than max_context \(64\) \(got 32\)"):
        engine_of(random_model("llama", seed=0), draft=tiny_model(config))


class _Peeking(nn.Module):
    """Module that adds the mean over tokens, which no configuration shows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1e-3 * x.mean(1, keepdim=True)  # type: ignore[no-any-return]


def test_a_module_that_mixes_tokens_outside_of_attention_is_named() -> None:
    model = random_model("llama", seed=0)
    model.model.layers[1].mlp = _Peeking(model.model.layers[1].mlp)
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.mlp mixes tokens outside of AttentionInterface"):
        engine_of(model)


def test_logits_that_are_changed_behind_the_head_are_the_models_own() -> None:
    verdict = judge(lambda: tiny_model(tiny_config("cohere", logit_scale=0.3)))
    assert verdict.kind == "right", verdict


def test_a_folder_without_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    random_model("llama", seed=0).save_pretrained(tmp_path)
    engine = Engine.from_pretrained(tmp_path, speculation="off", profile=False, max_context=64)
    [done] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4), seeds=[1])
    assert done.text is None
    with pytest.raises(InvalidRequest, match=r"^prompts: text needs a tokenizer, and the model folder holds none"):
        engine.generate(["hello"], SamplingParams(max_tokens=4), seeds=[1])


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral", "gemma2"])
def test_float64_is_the_reference_mode(model_type: str) -> None:
    model = tiny_model(tiny_config(model_type))
    engine = engine_of(copy.deepcopy(model), dtype="float64")
    [done] = engine.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=6, ignore_eos=True), seeds=[1])
    model = model.double()
    use_eager_experts(model)  # grouped products know no float64
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[1, 2, 3, 4, 5, *done.token_ids]]), use_cache=False).logits[0]
    wanted = logits.log_softmax(-1)[4:-1].gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(done.log_probs).double(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("other", ["weights", "RoPE base", "window", "norm weight", "expert"])
def test_a_sequence_of_another_model_of_the_same_shape_is_refused(other: str) -> None:
    kind = "mixtral" if other == "expert" else "mistral"
    source = engine_of(tiny_model(tiny_config(kind)))
    changes = {"RoPE base": {"rope_parameters": ROPE | {"rope_theta": 9999.0}}, "window": {"sliding_window": 24}}
    model = tiny_model(tiny_config(kind, **changes.get(other, {})))
    with torch.no_grad():
        if other == "weights":
            model = perturbed(model, 1e-4)
        if other == "norm weight":
            model.model.norm.weight[3] += 1e-3
        if other == "expert":
            model.model.layers[2].mlp.experts.down_proj[4, 0, 0] += 1e-3
    source.submit(REQUEST)
    source.step()
    state = source.export_sequence("a")
    with pytest.raises(SequenceStateError, match=r"fingerprint|architecture"):
        engine_of(model).import_sequence(state)
    same = engine_of(tiny_model(tiny_config(kind)))
    same.import_sequence(state)
    while same.has_work:
        same.step()


def test_new_weights_change_the_fingerprint_and_the_old_ones_bring_it_back() -> None:
    model = tiny_model(tiny_config("mixtral"))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = engine_of(model)
    before = engine.state.target.runner.fingerprint()
    engine.load_weights({name: tensor + 1e-3 for name, tensor in state.items()}, version=1)
    assert engine.state.target.runner.fingerprint() != before
    engine.load_weights(state, version=2)
    assert engine.state.target.runner.fingerprint() == before


def test_experts_loaded_later_are_those_loaded_first() -> None:
    model, other = (tiny_model(tiny_config("gpt_oss"), seed=seed) for seed in (0, 1))
    engine = engine_of(model)
    engine.load_weights({name: tensor.clone() for name, tensor in other.state_dict().items()}, version=1)
    fresh = engine_of(other)
    assert one_by_one(engine, [REQUEST])["a"].log_probs == one_by_one(fresh, [REQUEST])["a"].log_probs


def test_every_row_of_a_mixture_is_counted_once() -> None:
    engine = engine_of(tiny_model(tiny_config("mixtral")))
    assert all(sum(rows) == 0 for rows in engine.stats().expert_rows.values()), "the proof does not count"
    engine.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=7, ignore_eos=True), seeds=[1])
    rows = engine.stats().expert_rows
    assert len(rows) == 4
    assert {sum(counts) for counts in rows.values()} == {2 * (5 + 6)}, "2 experts a row; the last token is never run"
    assert engine_of(random_model("llama", seed=0)).stats().expert_rows == {}


def saved(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    random_model("llama", seed=0).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def without_a_layer(weights: dict[str, Tensor]) -> None:
    for name in [name for name in weights if ".layers.1." in name]:
        del weights[name]


def with_zeros(name: str, *shape: int) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: weights.update({name: torch.zeros(shape)})


LAYER = r"lacks 9 weights: model\.layers\.1\.input_layernorm\.weight, .*, \.\.\. \(got"
OTHER_WEIGHTS = {
    "fewer": (without_a_layer, LAYER),
    "more": (
        with_zeros("model.layers.9.mlp.up_proj.weight", 2, 2),
        r"has 1 weight: model\.layers\.9\.mlp\.up_proj\.weight that the model",
    ),
    "misshapen": (
        with_zeros("model.layers.0.self_attn.q_proj.weight", 3, 5),
        r"has 1 weight: model\.layers\.0\.self_attn\.q_proj\.weight 3x5, not 48x48",
    ),
    "no head": (lambda weights: weights.pop("lm_head.weight"), r"lacks 1 weight: lm_head\.weight"),
}


@pytest.mark.parametrize(("change", "said"), OTHER_WEIGHTS.values(), ids=OTHER_WEIGHTS)
def test_weights_are_never_drawn_at_random_nor_left_out(change: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=said):
        load_model(saved(tmp_path, change))


@pytest.mark.parametrize("role", ["path", "reference", "critic"])
def test_the_role_whose_weights_lack_is_named(role: str, tmp_path: Path) -> None:
    block = job.Model(path=str(tmp_path)) if role == "path" else job.Model(path="other", **{role: str(tmp_path)})
    load = {"path": load_policy, "reference": load_reference, "critic": load_critic}[role]
    saved(tmp_path, without_a_layer)
    with pytest.raises(InvalidRequest, match=rf"model\.{role}: its checkpoint {LAYER}"):
        load(block)


def test_a_drafter_whose_weights_lack_is_named(tmp_path: Path) -> None:
    random_model("llama", seed=0).save_pretrained(tmp_path / "model")
    with pytest.raises(InvalidRequest, match=f"drafter: its checkpoint {LAYER}"):
        Engine.from_pretrained(tmp_path / "model", drafter=saved(tmp_path / "drafter", without_a_layer))


@pytest.mark.parametrize(
    ("kind", "old"),
    [("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"), ("gpt2", "transformer.h.0.attn.masked_bias")],
)
def test_absent_tied_weights_and_old_buffers_are_accepted(kind: str, old: str, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(kind, tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in weights
    save_file(weights | {old: torch.ones(4)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = load_model(tmp_path).state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in model.state_dict().items())


def test_a_critic_may_begin_from_a_classifier(tmp_path: Path) -> None:
    """A critic makes its own head, so a missing or foreign one does not matter."""

    def as_a_classifier(weights: dict[str, Tensor]) -> None:
        weights["score.weight"] = torch.ones(1, weights.pop("lm_head.weight").shape[1])

    load_critic(job.Model(path="other", critic=str(saved(tmp_path, as_a_classifier))))
    with pytest.raises(InvalidRequest, match=r"lacks 1 weight: lm_head\.weight, and has 1 weight: score\.weight"):
        load_model(tmp_path)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut in the header": lambda content: content[:50],
    "cut in a tensor": lambda content: content[:-100],
    "other bytes": lambda content: b"\xff" * len(content),
    "a header that is no JSON": lambda content: content[:8] + b"[" + content[9:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_files_are_one_line(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    file = saved(tmp_path, lambda weights: None) / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(InvalidRequest, match="path: not a loadable Hugging Face causal LM: Error while"):
        load_model(tmp_path)

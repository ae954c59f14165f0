"""Models in bfloat16: the same rounding wherever a model loads, and never whole in float32 on the host."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from twins.gated_mlp import unpacked_weight

from rlhfspec import job
from rlhfspec.engine import SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.forward import runner
from rlhfspec.errors import UnsupportedModel
from rlhfspec.huggingface.fused import widened
from rlhfspec.huggingface.fused.casting import Precision, cast, precision_of
from rlhfspec.huggingface.fused.guard import Guard
from rlhfspec.huggingface.loading import load_model, load_stored
from rlhfspec.huggingface.proof.check import report_of
from rlhfspec.huggingface.proof.probes import choose
from rlhfspec.huggingface.proof.reference import Reference, Rounding, ask
from rlhfspec.huggingface.structure.anatomy import examine
from rlhfspec.kernels.linear import PackedLinear
from rlhfspec.sweep.classes import model_types, tiny_config, tiny_model
from rlhfspec.tiny import random_model
from rlhfspec.training.checkpoint.export import export_hf
from rlhfspec.training.modeling import loading
from rlhfspec.training.modeling.critic import Critic, load_critic
from rlhfspec.training.modeling.exact import ExactForward
from rlhfspec.training.modeling.loading import load_policy, load_reference, prepared
from rlhfspec.training.modeling.packed import pack_sequences
from rlhfspec.training.scoring.log_probs import LogProbScorer
from rlhfspec.training.scoring.values import ValueScorer
from rlhfspec.training.weights import FileWeightStore

pytestmark = pytest.mark.turns(parts=2)

BF16 = torch.bfloat16
LONG = 4096
# Routers, sinks and vectors of routers that stay in float32: by the class's list, and where it makes them.
MIXED = {"beam": "gate.weight", "ernie4_5_moe": "moe_statics", "flint": "sinks", "hunyuan_v1_moe": "wg.weight"}
AS_HUGGING_FACE = (
    *MIXED, "apertus", "bert", "deepseek_v3", "diffllama", "gemma2", "gemma3n_text", "gemma4_text", "gpt2",
    "gpt_neox", "gpt_oss", "llama", "llama4_text", "longcat_flash", "minimax_m2", "mixtral", "phi3", "qwen3_moe",
)  # fmt: skip


def loaded_by_hugging_face(model: Any) -> Any:
    tied = set(model.all_tied_weights_keys)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items() if name not in tied}
    return type(model).from_pretrained(None, config=model.config, state_dict=weights, dtype=BF16)


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("model_type", AS_HUGGING_FACE)
def test_cast_parameters_equal_those_of_hugging_face(model_type: str) -> None:
    model = tiny_model(tiny_config(model_type))
    wanted = dict(loaded_by_hugging_face(model).named_parameters())
    before = {name: (buffer.dtype, buffer.clone()) for name, buffer in model.named_buffers()}
    cast(model, precision_of(model, BF16))
    found = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, parameter in found.items():
        assert (name, parameter.dtype) == (name, wanted[name].dtype)
        assert torch.equal(parameter, wanted[name]), name
    kept = [name for name, parameter in found.items() if parameter.dtype == torch.float32]
    assert any(MIXED[model_type] in name for name in kept) if model_type in MIXED else not kept
    for name, (dtype, values) in before.items():
        assert model.get_buffer(name).dtype == dtype, name
        assert torch.equal(model.get_buffer(name), values), name


@pytest.mark.whole("a model of every class of transformers")
def test_no_buffer_of_any_class_changes_its_type() -> None:
    num_float = 0
    for model_type in model_types():
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32)  # type: ignore[no-untyped-call]
        except Exception:  # transformers' own, of any kind: the table in docs/models.md tells which
            continue
        before = {name: buffer.dtype for name, buffer in model.named_buffers()}
        cast(model, precision_of(model, BF16))
        assert {name: buffer.dtype for name, buffer in model.named_buffers()} == before, model_type
        num_float += sum(dtype.is_floating_point for dtype in before.values())
        assert any(parameter.dtype == BF16 for parameter in model.parameters()), model_type
    assert num_float > 150


def long_model(model_type: str = "llama", *, seed: int = 0) -> Any:
    return tiny_model(tiny_config(model_type, max_position_embeddings=LONG), seed=seed)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    long_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def with_buffers(model: nn.Module, precision: Precision) -> None:
    """Convert as `Module.to(dtype)` does; with float32 activations, only the remaining buffers."""
    cast(model, precision)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                rounded = buffer.to(BF16)
                module._buffers[name] = rounded.float() if precision.usual == torch.float32 else rounded


def load_engine(model: Any, *, dtype: str = "bfloat16", arithmetic: str = "auto", max_context: int = LONG) -> Any:
    options: dict[str, Any] = {"speculation": "off", "profile": False, "num_threads": 1, "max_sequences": 1}
    return make_engine(model, EngineConfig(dtype=dtype, arithmetic=arithmetic, max_context=max_context, **options))


def load_engine_as_on_a_gpu(patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(runner.ModelRunner, "activation_dtype", property(lambda self: self.config.dtype))
    return load_engine(long_model(), arithmetic="torch")


def saved_critic(folder: Path) -> str:
    critic = Critic(prepared(long_model(seed=1), max_context=LONG))
    critic.save(folder.parent / "critic")
    return str(folder.parent / "critic")


def block(folder: Path, **more: Any) -> job.Model:
    return job.Model(path=str(folder), dtype="bfloat16", **more)


# Everything that may keep a model in bfloat16.
LOADS: dict[str, Callable[[Path, pytest.MonkeyPatch], Any]] = {
    "trainer": lambda folder, _: load_policy(block(folder), max_context=LONG),
    "trainer with LoRA": lambda folder, _: load_policy(block(folder, lora=job.Lora(rank=2)), max_context=LONG),
    "reference": lambda folder, _: load_reference(block(folder), max_context=LONG),
    "critic": lambda folder, _: load_critic(block(folder), max_context=LONG),
    "saved critic": lambda folder, _: load_critic(block(folder, critic=saved_critic(folder)), max_context=LONG),
    "engine": lambda folder, _: load_engine(long_model()),
    "engine as on a GPU": lambda folder, patch: load_engine_as_on_a_gpu(patch),
}


def test_a_saved_critic_is_proved_with_its_own_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proved = list[Tensor]()

    def spy(model: Any, precision: Precision) -> None:
        proved.append(model.get_input_embeddings().weight.clone())
        cast(model, precision)

    path = saved_critic(folder)
    monkeypatch.setattr(loading, "cast", spy)
    critic = load_critic(block(folder, critic=path), max_context=LONG)
    assert torch.equal(proved[0], critic.trunk.embed_tokens.weight.float())
    assert {parameter.dtype for parameter in critic.parameters()} == {BF16}


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_rounded_buffers_are_refused_at_every_load(load: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(folder, monkeypatch)
    for place in (loading, runner):
        monkeypatch.setattr(place, "cast", with_buffers)
    said = r"logits differ from Hugging Face's by .*(4087 positions|position 4095);"
    with pytest.raises(UnsupportedModel, match=said):
        load(folder, monkeypatch)


class _Broken(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("ones", torch.eye(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x @ self.ones)  # type: ignore[no-any-return]


def test_a_model_that_cannot_run_in_bfloat16_is_refused_by_name() -> None:
    def model() -> Any:
        made = tiny_model(tiny_config("llama"))
        made.model.layers[1].mlp = _Broken(made.model.layers[1].mlp)
        return made

    prepared(model())
    with pytest.raises(UnsupportedModel, match="fails on packed rows in bfloat16: expected m1 and m2 to have the same"):
        prepared(model(), dtype="bfloat16")


def test_the_report_describes_the_model_that_runs() -> None:
    report = report_of(prepared(long_model(), dtype="bfloat16", max_context=LONG))
    assert report.probes[-1] == "32 tokens up to position 4095"
    assert 1e-3 < report.difference < 4 * report.noise < 0.1
    assert report_of(prepared(long_model(), max_context=LONG)).difference < 1e-5


def held(engine: Any, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    module = engine.state.target.runner.fused.model.get_submodule(path)
    return unpacked_weight(module) if isinstance(module, PackedLinear) else getattr(module, leaf)


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("model_type", MIXED)
def test_the_engine_keeps_in_float32_what_hugging_face_does(model_type: str) -> None:
    model, other = (tiny_model(tiny_config(model_type), seed=seed) for seed in (0, 1))
    states = [{name: tensor.clone() for name, tensor in each.state_dict().items()} for each in (model, other)]
    names = precision_of(model, BF16).in_float32
    assert names
    engine, fresh = (load_engine(each, max_context=128) for each in (model, other))
    assert all(torch.equal(held(engine, name), states[0][name]) for name in names)
    engine.load_weights(states[1], version=1)
    assert all(torch.equal(held(engine, name), states[1][name]) for name in names)
    prompt, params = [[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True)
    one, two = (each.generate(prompt, params, seeds=[1])[0].log_probs for each in (engine, fresh))
    assert one == two, "weights that come later are kept as the first ones"
    guard = fresh.state.target.runner.fused.guard
    assert model_type == "hunyuan_v1_moe" or {packed.dtype for packed in guard._packed.values()} == {torch.float32}


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("model_type", MIXED)
def test_the_exact_trainer_and_the_scorer_have_the_same_bits(model_type: str) -> None:
    model = tiny_model(tiny_config(model_type))
    scorer = LogProbScorer(copy.deepcopy(model), temperature=1.0, max_context=128, dtype="bfloat16")
    exact = ExactForward(prepared(model, max_context=128), 1.0, max_context=128, dtype="bfloat16")
    prompt, response = (5, 6, 7), tuple(range(3, 60))
    assert exact(pack_sequences([prompt], [response])).log_probs.tolist() == scorer.log_probs(prompt, response)


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("model_type", MIXED)
def test_trained_weights_reach_engine_and_export_as_they_are_kept(model_type: str, tmp_path: Path) -> None:
    policy = prepared(tiny_model(tiny_config(model_type)), dtype="bfloat16", max_context=128)
    store = FileWeightStore(tmp_path / "weights", keep=1)
    state = store.get(store.put("mixed", "policy", 1, policy.state_dict()))
    assert {tensor.dtype for tensor in state.values()} >= {BF16, torch.float32}
    engine = load_engine(tiny_model(tiny_config(model_type), seed=1), max_context=128)
    engine.load_weights(state, version=1)
    in_float32 = precision_of(policy, BF16).in_float32
    assert all(torch.equal(held(engine, name), policy.get_parameter(name)) for name in in_float32)
    exported = export_hf(tmp_path / "export", state, policy.config)
    again = AutoModelForCausalLM.from_pretrained(exported, dtype="auto").state_dict()
    for name, parameter in policy.named_parameters():
        assert (name, again[name].dtype) == (name, parameter.dtype)
        assert torch.equal(again[name], parameter), name


BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"


def test_a_buffer_that_is_loaded_later_is_not_rounded() -> None:
    model = tiny_model(tiny_config("deepseek_v3"))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = load_engine(model, max_context=128)
    state[BIAS] += torch.linspace(0.1, 0.3, len(state[BIAS]))
    engine.load_weights(state, version=1)
    assert torch.equal(held(engine, BIAS), state[BIAS])


def test_the_critics_scorer_has_the_trainers_frequencies() -> None:
    critic = Critic(prepared(long_model(), dtype="bfloat16", max_context=LONG))
    inv_freq = long_model().model.rotary_emb.inv_freq
    assert torch.equal(critic.trunk.rotary_emb.inv_freq, inv_freq)
    scorer = ValueScorer(critic, max_context=LONG)
    assert torch.equal(scorer._rows.runner.fused.model.trunk.rotary_emb.original.inv_freq, inv_freq)


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
    rounding = Rounding(precision_of(model, BF16), arithmetic=arithmetic)
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
    for layer in (layers := model.model.layers):
        layer.mlp.register_forward_hook(lambda *_: seen.append([each.mlp.up_proj.weight.dtype for each in layers]))
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


def test_a_widened_weight_is_forgotten_when_its_memory_is_freed() -> None:
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


def test_an_engine_of_stored_weights_equals_one_of_wide_weights(tmp_path: Path) -> None:
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
            report = report_of(prepared(load(tmp_path), dtype=dtype, max_context=64))
            found.append((done.token_ids, done.log_probs, report.difference, report.noise))
        assert found[0] == found[1]

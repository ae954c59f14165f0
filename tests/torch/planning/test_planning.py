"""A job's GPU plan against torch's FakeTensor: the trainer's step at widths of 8B, 32B and 70B."""

import copy
from types import ModuleType
from typing import Any

import pytest
from learners import spec
from places import ROOT, TESTS
from transformers import AutoConfig

from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.huggingface.devices import settled
from rlhfspec.job import Lora
from rlhfspec.tiny import MODEL_KINDS, random_model
from rlhfspec.training.modeling import lora
from rlhfspec.training.modeling.loading import prepared
from rlhfspec.training.planning.needs import generator, trainer
from rlhfspec.training.planning.shape import shape_of

pytestmark = pytest.mark.turns(parts=2)

CONFIGS = {
    "8b": ROOT / "examples" / "cluster" / "8b" / "config.json",
    "32b": TESTS / "data" / "config_32b.json",
    "70b": ROOT / "examples" / "cluster" / "70b" / "config.json",
}
TOKENS = 4096
LAYERS = (4, 6)  # of fewer the head decides
LAYERS_AGAIN = (14, 16)  # so many that layers, or autocast's copies of weights, decide, and not the head
RANKS = [(*ranks, again) for ranks in ((1, 1), (8, 1), (8, 2), (8, 8)) for again in (False, True)]
MODES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "autocast": {"autocast": "bfloat16"},
}


def config_of(size: str, num_layers: int | None = None) -> Any:
    config = AutoConfig.from_pretrained(CONFIGS[size])
    if num_layers is not None:
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:num_layers]
    return config


def spec_of(*arguments: Any, **options: Any) -> Any:
    return settled(spec(*arguments, **options), "cpu")


def of_ranks(ranks: int, settings: Any, parts: int = 1) -> Any:
    given = settings.model_dump(by_alias=True)
    trainer = {"ranksPerNode": ranks, "tensorParallel": parts}
    return type(settings).model_validate(given | {"roles": {"trainer": trainer}})


def fake_peak(size: str, settings: Any, again: bool) -> float:
    from fake_steps import peak_of_step

    counts = LAYERS_AGAIN if again else LAYERS
    few, more = (peak_of_step(config_of(size, count), settings, TOKENS, again=again) for count in counts)
    a_layer = (more - few) / (counts[1] - counts[0])
    return few + a_layer * (config_of(size).num_hidden_layers - counts[0])


@pytest.mark.timeout(600)
@pytest.mark.sweep(parts=72)
@pytest.mark.parametrize(("ranks", "parts", "again"), RANKS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", CONFIGS)
def test_the_planned_peak_is_within_a_tenth_of_that_of_fake_tensors(
    second: ModuleType, size: str, mode: str, ranks: int, parts: int, again: bool
) -> None:
    recomputed = {"activationCheckpointing": "on" if again else "off"}
    settings = of_ranks(ranks, spec_of(tokensPerMicroBatch=TOKENS, **recomputed, **MODES[mode]), parts)
    planned = trainer(settings, {"path": shape_of(config_of(size), name=size)}, 80 * 10**9)
    found = fake_peak(size, settings, again)
    assert abs(planned.total - found) < 0.1 * found
    states = sum(planned.parts[name] for name in ("weights", "gradients", "optimizer"))
    beside, found_beside = planned.total - states, found - states
    assert abs(beside - found_beside) < 0.1 * found_beside, "also without what is simply counted"


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_sizes_are_those_of_the_model_itself(kind: str) -> None:
    model = random_model(kind, seed=0)
    shape = shape_of(model.config, name=kind)
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    settings = {"max_sequences": 1, "max_context": 64, "profile": False, "speculation": "off", "device": "cpu"}
    runner = make_engine(copy.deepcopy(model), EngineConfig(**settings)).state.target.runner
    assert 4 * shape.num_layers * shape.kv_width == runner.bytes_per_position
    update = Lora(rank=2)
    lora.add_lora(prepared(model), update, seed=0)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert shape.lora_parameters(2, update.target_modules) == trained


def test_a_low_rank_update_plans_gradients_and_moments_for_itself_only() -> None:
    shapes = {"path": shape_of(config_of("8b"), name="8b")}
    whole, low = (trainer(spec_of(model=model), shapes, 80 * 10**9) for model in ({}, {"lora": {"rank": 8}}))
    assert low.parts["gradients"] < 0.01 * whole.parts["gradients"]
    assert low.parts["optimizer"] == 2 * low.parts["gradients"]
    assert low.parts["weights"] == whole.parts["weights"] + low.parts["gradients"]


def test_a_critic_is_trained_beside_the_policy_or_on_the_other_rank() -> None:
    shapes = {"path": shape_of(config_of("8b"), name="8b")}
    of_policy = trainer(spec_of(), shapes, 80 * 10**9).parts
    assert trainer(spec_of("ppo"), shapes, 80 * 10**9).parts["optimizer"] == 2 * of_policy["optimizer"]
    apart = trainer(of_ranks(2, spec_of("ppo", fuse="auto")), shapes, 80 * 10**9)
    assert (apart.parts["optimizer"], apart.parts["gathered"], apart.count) == (of_policy["optimizer"], 0, 2)


def test_layers_are_computed_again_where_they_would_not_fit() -> None:
    shapes = {"path": shape_of(config_of("8b"), name="8b")}
    settings = spec_of(model={"dtype": "bfloat16"}, tokensPerMicroBatch=4096)
    little, much = (trainer(settings, shapes, size * 10**9) for size in (80, 192))
    assert ("activations recomputed" in little.notes[0], "activations kept" in much.notes[0]) == (True, True)
    assert little.parts["activations"] < much.parts["activations"]


def test_kv_takes_what_is_left_and_no_more_than_all_sequences_use() -> None:
    shapes = {"path": shape_of(config_of("8b"), name="8b")}
    settings = spec_of()
    small, large = (generator(settings, shapes, size * 10**9, 1) for size in (48, 192))
    assert 0.8 * 48e9 < small.total <= 0.85 * 48e9
    assert large.parts["KV"] == 64 * (512 + 24 + 80) * 32 * 2048 * 4
    assert generator(settings, shapes, 192 * 10**9, 3).count == 3


def test_a_policy_that_drafts_for_itself_has_its_copy_beside_the_weights() -> None:
    shapes = {"path": shape_of(config_of("8b"), name="8b")}
    plain, drafting, with_mtp = (
        generator(spec_of(model={"drafter": drafter}), shapes, 192 * 10**9, 1) for drafter in (None, "self", "mtp")
    )
    assert 4.4e9 < drafting.parts["weights"] - plain.parts["weights"] < 4.6e9
    assert 8.7e8 < with_mtp.parts["weights"] - plain.parts["weights"] < 8.8e8

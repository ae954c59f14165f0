"""What a job takes of its GPUs, against torch's FakeTensor: the trainer's own step at the widths of 8B, 32B and 70B."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from learners import spec
from places import ROOT, TESTS
from transformers import AutoConfig

from rlhfspec.huggingface.devices import settled
from rlhfspec.training.planning.needs import trainer
from rlhfspec.training.planning.shape import shape_of

CONFIGS = {
    "8b": ROOT / "examples" / "cluster" / "8b" / "config.json",
    "32b": TESTS / "data" / "config_32b.json",
    "70b": ROOT / "examples" / "cluster" / "70b" / "config.json",
}
TOKENS = 4096
LAYERS = (6, 8)  # so many that they and not the head decide how much it is
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


def of_ranks(ranks: int, settings: Any) -> Any:
    given = settings.model_dump(by_alias=True)
    return type(settings).model_validate(given | {"roles": {"trainer": {"ranksPerNode": ranks}}})


def fake_peak(size: str, settings: Any, again: bool) -> float:
    """Of all layers, by two models of a few: memory is a number and so much more with every layer."""
    from fake_steps import peak_of_step

    few, more = (peak_of_step(config_of(size, count), settings, TOKENS, again=again) for count in LAYERS)
    num_layers = config_of(size).num_hidden_layers
    return few + (more - few) / (LAYERS[1] - LAYERS[0]) * (num_layers - LAYERS[0])


@pytest.mark.sweep(parts=9)
@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", CONFIGS)
def test_the_trainers_peak_is_within_a_tenth_of_faketensors(
    second: ModuleType, size: str, mode: str, again: bool, ranks: int
) -> None:
    recomputed = {"activationCheckpointing": "on" if again else "off"}
    settings = settled(of_ranks(ranks, spec(tokensPerMicroBatch=TOKENS, **recomputed, **MODES[mode])), "cpu")
    planned = trainer(settings, {"path": shape_of(config_of(size), name=size)}, 80 * 10**9)
    found = fake_peak(size, settings, again)
    assert abs(planned.total - found) < 0.1 * found
    states = sum(planned.parts[name] for name in ("weights", "gradients", "optimizer"))
    beside, found_beside = planned.total - states, found - states
    assert abs(beside - found_beside) < 0.1 * found_beside, "also without what is simply counted"

"""What Hugging Face said of a model is said again of that model alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from asked_once import examined, told_by
from torch import nn

from rlhfspec.huggingface.structure.anatomy import examine
from rlhfspec.huggingface.structure.causal_lm import anatomy_of
from rlhfspec.tiny import random_model


class Other(nn.Linear):
    """A module that may do anything."""


def a_weight(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 2] += 1e-3


def a_class(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.__class__ = Other


def the_configuration(model: Any) -> None:
    model.config.rope_parameters["rope_theta"] = 5000.0


def the_dtype(model: Any) -> None:
    model.double()


@pytest.mark.parametrize("change", [a_weight, a_class, the_configuration, the_dtype])
def test_a_model_that_differs_is_another(change: Any) -> None:
    one, other = random_model("llama", seed=0), random_model("llama", seed=0)
    assert told_by(one) == told_by(other)
    change(other)
    assert told_by(one) != told_by(other)


def test_the_same_model_is_examined_once_and_knows_it() -> None:
    asked = []

    def counted(model: Any, **how: Any) -> Any:
        asked.append(model)
        return examine(model, **how)

    once = examined(counted)
    models = [random_model("llama", seed=seed) for seed in (0, 0, 1)]
    found = [once(model, name="model", max_context=64) for model in models]
    assert asked == [models[0], models[2]]
    assert [anatomy_of(model) for model in models] == found
    once(models[1], name="model", max_context=128)
    assert asked[2:] == [models[1]]

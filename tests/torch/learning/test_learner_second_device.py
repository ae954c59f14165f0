"""The learner on a device that is not the CPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from learners import policy, rollouts, spec

from rlhfspec.training.learning.learner import Learner
from rlhfspec.training.modeling import lora

DEVICE = "second:1"


def test_dropout_leaves_the_random_state_of_every_other_device_alone(
    second: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = torch.get_device_module("second")
    asked = []
    state_of = module.get_rng_state
    monkeypatch.setattr(module, "get_rng_state", lambda device: asked.append(device) or state_of(device))
    settings = spec(model={"lora": {"rank": 2, "dropout": 0.5}})
    assert settings.model.lora is not None
    model = policy()
    lora.add_lora(model, settings.model.lora, seed=0)
    learner = Learner(settings, model, num_threads=1, device=DEVICE)
    before = torch.random.get_rng_state()
    learner.learn(rollouts(0))
    assert set(asked) == {torch.device(DEVICE)}
    assert torch.equal(torch.random.get_rng_state(), before)
    assert {str(tensor.device) for tensor in learner.policy_state().values()} == {DEVICE}

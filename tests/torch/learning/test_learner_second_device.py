from types import ModuleType
from typing import Any

import pytest
import torch
from learners import learner, rollouts, spec

from rlhfspec.huggingface.devices import settled

DEVICE = "second:1"


def test_dropout_leaves_other_devices_random_state_alone(second: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = torch.get_device_module("second")
    asked = []
    state_of = module.get_rng_state
    monkeypatch.setattr(module, "get_rng_state", lambda device: asked.append(device) or state_of(device))
    trained = learner(spec(model={"lora": {"rank": 2, "dropout": 0.5}}), device=DEVICE)
    before = torch.random.get_rng_state()
    trained.learn(rollouts(0))
    assert set(asked) == {torch.device(DEVICE)}
    assert torch.equal(torch.random.get_rng_state(), before)
    assert {str(tensor.device) for tensor in trained.policy_state().values()} == {DEVICE}


def test_auto_keeps_float32_and_computes_in_bfloat16(second: ModuleType) -> None:
    """An update of 1e-6 stays, which bfloat16 weights would lose. On a CPU nothing is bfloat16."""
    trained = learner(spec(optimizer={"learningRate": 1e-6}, autocast="auto"), device=DEVICE)
    before = {name: tensor.clone() for name, tensor in trained.policy_state().items()}
    assert {tensor.dtype for tensor in before.values()} == {torch.float32}
    there = trained.learn(rollouts(0)).log_probs
    assert all(not torch.equal(before[name], tensor) for name, tensor in trained.policy_state().items())
    log_probs = {each: learner(spec(autocast=each)).learn(rollouts(0)).log_probs for each in ("auto", "off")}
    assert torch.equal(log_probs["auto"], log_probs["off"])
    difference = float((there - log_probs["off"]).abs().max())
    assert 1e-4 < difference < 0.2, difference


@pytest.mark.parametrize(
    ("given", "on_a_gpu", "on_a_cpu"),
    [
        ({}, ("bfloat16", "float32", "bfloat16"), ("float32", "float32", "off")),
        ({"model": "bfloat16"}, ("bfloat16", "bfloat16", "off"), ("float32", "bfloat16", "off")),
        ({"model": "float32"}, ("bfloat16", "float32", "off"), ("float32", "float32", "off")),
        ({"generation": "float32"}, ("float32", "float32", "bfloat16"), ("float32", "float32", "off")),
        ({"autocast": "bfloat16"}, ("bfloat16", "float32", "bfloat16"), ("float32", "float32", "bfloat16")),
    ],
)
def test_given_precisions_stay_and_auto_depends_on_the_device(
    given: dict[str, str], on_a_gpu: tuple[str, ...], on_a_cpu: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    content = spec(autocast=given.get("autocast", "auto")).model_dump(by_alias=True)
    content["model"]["dtype"], content["generation"]["dtype"] = (given.get(x, "auto") for x in ("model", "generation"))
    for device, wanted in (("cuda:0", on_a_gpu), ("cpu", on_a_cpu)):
        caplog.clear()
        found = settled(type(spec()).model_validate(content), device)
        assert (found.generation.dtype, found.model.dtype, found.training.autocast) == wanted
        slow = [f"{of}.dtype" for of in ("generation", "model") if given.get(of) == "float32" and device != "cpu"]
        assert [record.getMessage().split(":")[0] for record in caplog.records] == slow

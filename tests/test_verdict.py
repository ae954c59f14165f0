"""The judge's own rules: what counts as rounding, as a corner of an activation, and what does not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from rlhfspec.modeling import exact_functions
from rlhfspec.sweep import verdict as verdicts
from rlhfspec.sweep.verdict import judge
from rlhfspec.tiny.classes import tiny_config, tiny_model, variants


def test_a_corner_that_rounding_turns_is_no_wrong_gradient() -> None:
    """HRM with relu6: one number lies within rounding of a corner, so one row of a gradient is another."""
    config = dict(variants("hrm_text"))["hidden_act=relu6"]()
    verdict = judge(lambda: tiny_model(config))
    assert verdict.kind == "right", verdict


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = exact_functions.activation_twin

    def twin(x: torch.Tensor, name: Any) -> torch.Tensor:
        return genuine(x * 1.001, name)

    monkeypatch.setattr(exact_functions, "activation_twin", twin)
    verdict = judge(partial(tiny_model, tiny_config("llama")))
    assert verdict.kind == "wrong", verdict
    assert "the exact trainer's gradient of" in verdict.detail


def test_log_probs_that_are_off_are_not_taken_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """BitNet's rounding is above 1e-5 with one key head; an error three times as large is still an error."""
    config = dict(variants("bitnet"))["num_key_value_heads=1"]()
    assert judge(lambda: tiny_model(config)).kind == "right"
    genuine = verdicts._generated
    monkeypatch.setattr(verdicts, "_generated", lambda samples: genuine(samples) + 4e-5)
    verdict = judge(lambda: tiny_model(config))
    assert verdict.kind == "wrong"
    assert verdict.detail.startswith("log-probs differ from the oracle's by")

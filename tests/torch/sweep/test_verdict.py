"""Rules of the sweep's judge: rounding, corners of activations, and errors."""

import re
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from rlhfspec.huggingface.fused.casting import Precision
from rlhfspec.huggingface.proof import reference
from rlhfspec.sweep import by_position
from rlhfspec.sweep import verdict as verdicts
from rlhfspec.sweep.classes import tiny_config, tiny_model, variants
from rlhfspec.sweep.verdict import judge
from rlhfspec.sweep.ways import one_by_one
from rlhfspec.training.modeling import exact_functions, loading
from rlhfspec.training.modeling.exact import ExactForward
from rlhfspec.training.modeling.packed import PackedRow


def test_a_corner_that_rounding_turns_is_no_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """HRM with relu6 may lie within rounding of a corner; here one is constructed."""
    config = dict(variants("hrm_text"))["hidden_act=relu6"]()
    judging = verdicts._Judge(lambda: tiny_model(config), max_context=128)
    plain = judging.engine()
    judging.requests = list(judging._requests(plain.state.target.runner.num_token_ids))
    alone = one_by_one(plain, judging.requests)
    exact, batch = judging._check_exact(alone, "float32"), verdicts._packed(alone)
    genuine = judging._gradient_problem
    asked: list[int] = []

    def with_a_corner(exact: ExactForward, batch: PackedRow, *, seed: int) -> str:
        asked.append(seed)
        return genuine(exact, batch, seed=seed) if seed else "another gradient beside a corner"

    monkeypatch.setattr(judging, "_gradient_problem", with_a_corner)
    judging._check_gradients(exact, batch)
    assert asked in ([0, 1], [0, 1, 2])


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = exact_functions.activation_twin

    def twin(x: torch.Tensor, name: Any) -> torch.Tensor:
        return genuine(x * 1.001, name)

    monkeypatch.setattr(exact_functions, "activation_twin", twin)
    verdict = judge(partial(tiny_model, tiny_config("llama")))
    assert verdict.kind == "wrong", verdict
    assert "the exact trainer's gradient of" in verdict.detail


def test_log_probs_that_are_off_are_not_taken_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """BitNet's rounding exceeds 1e-5 with one key head; three times as much is still an error."""
    config = dict(variants("bitnet"))["num_key_value_heads=1"]()
    assert judge(lambda: tiny_model(config)).kind == "right"
    genuine = verdicts._generated
    monkeypatch.setattr(verdicts, "_generated", lambda samples: genuine(samples) + 4e-5)
    verdict = judge(lambda: tiny_model(config))
    assert verdict.kind == "wrong"
    assert verdict.detail.startswith("log-probs differ from the oracle's by")


@torch.no_grad()
def far_seeing() -> Any:
    model = tiny_model(tiny_config("llama", max_position_embeddings=1024))
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.mul_(2.0)
    return model


def round_buffers_too(patch: pytest.MonkeyPatch) -> None:
    def cast_all(model: Any, precision: Precision) -> None:
        model.to(precision.usual)

    patch.setattr(loading, "cast", cast_all)


def test_an_error_that_grows_with_the_position_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    bands = by_position.judge_positions(far_seeing, num_tokens=1024, vocab_size=97)
    assert [(band.start, band.stop) for band in bands] == [(0, 128), (128, 256), (256, 512), (512, 1023)]
    assert max(band.ratio for band in bands) < 1.3
    round_buffers_too(monkeypatch)
    monkeypatch.setattr(reference.Reference, "check", lambda *given, **named: 0.0)  # the proof would refuse it
    bands = by_position.judge_positions(far_seeing, num_tokens=1024, vocab_size=97)
    assert [first.ratio < second.ratio for first, second in pairwise(bands)] == [True] * 3
    verdict = judge(far_seeing)
    assert verdict.kind == "wrong", verdict
    assert re.fullmatch(
        r"the trainer's log-probs in bfloat16 are \d+\.\d\d times as far from float32's as Hugging Face's at positions "
        r"512 to 1023",
        verdict.detail,
    )


def test_what_the_proof_refuses_in_bfloat16_alone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    round_buffers_too(monkeypatch)
    verdict = judge(far_seeing)
    assert verdict.kind == "right", verdict
    [limit] = verdict.limits
    assert limit.startswith("no model.dtype bfloat16: LlamaForCausalLM: the trainer's logits differ from")


def test_rope_that_changes_behind_the_samples_is_judged_before(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dict(variants("llama"))["rope=longrope"]()
    verdict = judge(partial(tiny_model, config))
    assert verdict.kind == "right", verdict
    assert verdict.in_bfloat16 is not None
    assert verdict.in_bfloat16.stop == 127

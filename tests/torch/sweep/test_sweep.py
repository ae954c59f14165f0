"""Part of the sweep over transformers' causal LMs. All: `rlhfspec models check all --table docs/models.md`."""

import re
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from places import ROOT

from rlhfspec.huggingface.fused.casting import Precision
from rlhfspec.huggingface.proof import reference
from rlhfspec.sweep import by_position, verdict as verdicts
from rlhfspec.sweep.classes import model_types, tiny_config, tiny_model, variants
from rlhfspec.sweep.run import Case, Judged, judge_case
from rlhfspec.sweep.table import BEGIN, END, markdown, write_into
from rlhfspec.sweep.verdict import Verdict, judge
from rlhfspec.sweep.ways import one_by_one
from rlhfspec.training.modeling import exact_functions, loading
from rlhfspec.training.modeling.exact import ExactForward
from rlhfspec.training.modeling.packed import PackedRow

pytestmark = pytest.mark.turns(parts=3)

DOCUMENT = ROOT / "docs" / "models.md"
RIGHT = (
    "bert", "cohere2", "deepseek_v3", "diffllama", "exaone4", "fuyu", "gemma3_text", "glm4", "gpt2", "gpt_neox",
    "gpt_oss", "granitemoe", "llama4_text", "mixtral", "nemotron", "olmo2", "olmoe", "opt", "phi3", "qwen2_moe",
    "qwen3_moe", "smollm3", "starcoder2",
)  # fmt: skip
RIGHT_VARIANTS = (
    ("gpt2", "activation_function=relu6"), ("gpt2", "activation_function=quick_gelu"),
    ("llama", "hidden_act=gelu_10"), ("llama", "rope=llama3"), ("llama", "tie_word_embeddings=True"),
    ("mixtral", "sliding_window=24"), ("phi3", "rope=longrope"),
)  # fmt: skip
REFUSED = ("bloom", "deepseek_v4", "doge", "mamba", "xlnet")


def table_of(document: str) -> dict[str, tuple[str, str]]:
    found, heading = dict[str, tuple[str, str]](), ""
    for line in document.partition(BEGIN)[2].partition(END)[0].splitlines():
        if line.startswith("### "):
            heading = line.removeprefix("### ")
        if line.startswith("| ") and not line.endswith("| types |") and "variants are" not in heading:
            types = line.removesuffix(" |").rpartition(" | ")[2]
            found |= dict.fromkeys(types.split(", "), (heading, line))
    return found


@pytest.mark.sweep(parts=12)
@pytest.mark.parametrize("model_type", RIGHT)
def test_supported_model_types_are_judged_right(model_type: str) -> None:
    verdict = judge_case(Case(model_type, ""))
    assert (verdict.kind, verdict.detail, verdict.limits) == ("right", "", [])
    assert verdict.in_bfloat16.ratio < 1.5
    assert table_of(DOCUMENT.read_text())[model_type][0] == "Right in every bit"


@pytest.mark.sweep(parts=7)
@pytest.mark.parametrize(("model_type", "variant"), RIGHT_VARIANTS)
def test_variants_of_supported_types_are_judged_right(model_type: str, variant: str) -> None:
    verdict = judge_case(Case(model_type, variant))
    assert verdict.kind == "right", verdict


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("model_type", REFUSED)
def test_types_that_are_refused_say_why(model_type: str) -> None:
    verdict = judge_case(Case(model_type, ""))
    assert verdict.kind == "refused", verdict
    heading, line = table_of(DOCUMENT.read_text())[model_type]
    assert heading == "Refused"
    assert line.removeprefix("| ").partition(" | ")[0].replace("&lt;", "<") in verdict.detail


@pytest.mark.parametrize(
    ("case", "kind", "detail"),
    [
        (Case("llama", "rope=longrope, beyond"), "refused", "RoPE whose angles depend on the length of the sequence"),
        (Case("gemma3n", ""), "not made", "timm"),
    ],
)
def test_what_is_refused_or_cannot_be_made_says_why(case: Case, kind: str, detail: str) -> None:
    verdict = judge_case(case)
    assert verdict.kind == kind, verdict
    assert detail in verdict.detail


def test_the_document_has_every_type_and_nothing_wrong() -> None:
    table = table_of(DOCUMENT.read_text())
    assert sorted(table) == sorted(model_types())
    headings = [heading for heading, _ in table.values()]
    assert headings.count("Wrong") == 0
    assert headings.count("Right in every bit") >= 100
    num_right = headings.count("Right in every bit")
    assert f"{num_right} of the {len(headings)} causal LMs" in (DOCUMENT.parents[1] / "README.md").read_text()
    assert not re.search(r"\| wrong \||\d wrong", DOCUMENT.read_text().partition(BEGIN)[2])


def test_each_variant_changes_one_field() -> None:
    plain = tiny_config("mistral").to_dict()
    for name, make in variants("mistral"):
        changed = {field for field, value in make().to_dict().items() if plain[field] != value}
        assert len(changed) == bool(name), (name, changed)


def judged(model_type: str, variant: str = "", **verdict: str) -> Judged:
    return Judged(Case(model_type, variant), Verdict(**verdict), 1.0)  # type: ignore[arg-type]


def test_the_table_is_written_between_its_marks_and_nowhere_else() -> None:
    some = [
        judged("mamba", kind="refused", detail="a model without <attention> | at all"),
        judged("mamba", "bias=True", kind="refused", detail="the same"),
        judged("odd", kind="wrong", detail="other bits"),
        judged("gemma3n", kind="not made", detail="needs timm"),
    ]
    text = write_into(f"# Models\n{BEGIN}old\n{END}More.\n", some)
    assert text.startswith("# Models\n" + BEGIN)
    assert text.endswith(END + "More.\n")
    assert "old" not in text
    assert "3 types: 1 refused, 1 wrong, 1 not made." in text
    assert r"| a model without &lt;attention> \| at all | mamba |" in text
    assert write_into(text, some) == text
    assert write_into("", some) == markdown(some)


def test_rounding_at_a_corner_is_not_judged_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_wrong_log_probs_are_not_taken_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_model_refused_only_in_bfloat16_is_reported_with_that_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    round_buffers_too(monkeypatch)
    verdict = judge(far_seeing)
    assert verdict.kind == "right", verdict
    [limit] = verdict.limits
    assert limit.startswith("no model.dtype bfloat16: LlamaForCausalLM: the trainer's logits differ from")


def test_longrope_is_judged_below_its_original_length(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = judge(partial(tiny_model, dict(variants("llama"))["rope=longrope"]()))
    assert verdict.kind == "right", verdict
    assert verdict.in_bfloat16.stop == 127

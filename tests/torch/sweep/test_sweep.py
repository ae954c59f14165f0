"""Part of the sweep over transformers' causal LMs. All: `rlhfspec models check all --table docs/models.md`."""

import re

import pytest
from places import ROOT

from rlhfspec.sweep.classes import model_types, tiny_config, variants
from rlhfspec.sweep.run import Case, Judged, judge_case
from rlhfspec.sweep.table import BEGIN, END, markdown, write_into
from rlhfspec.sweep.verdict import Verdict

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
        row = re.match(r"\| ([\w-]+) \|", line)
        if row and row[1] != "type" and "variants are" not in heading:
            found[row[1]] = (heading, line)
    return found


@pytest.mark.sweep(parts=6)
@pytest.mark.parametrize("model_type", RIGHT)
def test_types_that_are_right(model_type: str) -> None:
    verdict = judge_case(Case(model_type, ""))
    assert (verdict.kind, verdict.detail, verdict.limits) == ("right", "", [])
    assert verdict.in_bfloat16 is not None
    assert verdict.in_bfloat16.ratio < 1.5
    assert table_of(DOCUMENT.read_text())[model_type][0] == "Right in every bit"


@pytest.mark.sweep(parts=4)
@pytest.mark.parametrize(("model_type", "variant"), RIGHT_VARIANTS)
def test_variants_that_are_right(model_type: str, variant: str) -> None:
    verdict = judge_case(Case(model_type, variant))
    assert verdict.kind == "right", verdict


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("model_type", REFUSED)
def test_types_that_are_refused_say_why(model_type: str) -> None:
    verdict = judge_case(Case(model_type, ""))
    assert verdict.kind == "refused", verdict
    heading, line = table_of(DOCUMENT.read_text())[model_type]
    assert heading == "Refused"
    assert verdict.detail in line.replace("&lt;", "<")


def test_a_variant_that_is_refused_says_why() -> None:
    verdict = judge_case(Case("llama", "rope=longrope, beyond"))
    assert verdict.kind == "refused", verdict
    assert "RoPE whose angles depend on the length of the sequence" in verdict.detail


def test_the_document_has_every_type_and_nothing_wrong() -> None:
    table = table_of(DOCUMENT.read_text())
    assert sorted(table) == sorted(model_types())
    headings = [heading for heading, _ in table.values()]
    assert headings.count("Wrong") == 0
    assert headings.count("Right in every bit") >= 100
    num_right = headings.count("Right in every bit")
    assert f"{num_right} of the {len(headings)} causal LMs" in (DOCUMENT.parents[1] / "README.md").read_text()
    tables = DOCUMENT.read_text().partition(BEGIN)[2]
    assert not re.search(r"\| wrong \||\d wrong", tables)


def test_a_type_that_transformers_cannot_make_is_said_so() -> None:
    verdict = judge_case(Case("gemma3n", ""))
    assert verdict.kind == "not made"
    assert "timm" in verdict.detail


def test_variants_turn_one_thing_each() -> None:
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
    assert r"| mamba | a model without &lt;attention> \| at all |  |" in text
    assert write_into(text, some) == text
    assert write_into("", some) == markdown(some)

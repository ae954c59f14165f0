"""The one table of rules matches the API server's, and every rule can be broken."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invalid_jobs import all_wrong
from pydantic import ValidationError

from rlhfspec.cluster.crd import custom_resource_definition
from rlhfspec.job import RLHFJob
from rlhfspec.job.file.rules.condition import fields_of, info_of, to_cel, value_of
from rlhfspec.job.file.rules.sources import SOURCES_RULES
from rlhfspec.job.file.rules.table import RULES, JobRule

FIELDS = ("training.steps", "training.seed", "training.epochs")
numbers = st.recursive(
    st.sampled_from(FIELDS) | st.integers(0, 3).map(str),
    lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from("+*"), inner),
    max_leaves=3,
)
signs = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
conditions = st.recursive(
    st.builds("({} {} {})".format, numbers, signs, numbers)
    | st.builds("({} <= {} < {})".format, numbers, numbers, numbers)
    | st.builds("({} {} {})".format, numbers, st.sampled_from(["in", "not in"]), st.lists(st.integers(0, 3)).map(str)),
    lambda inner: (
        st.builds("({} {} {})".format, inner, st.sampled_from(["and", "or"]), inner)
        | st.builds("(not {})".format, inner)
    ),
    max_leaves=6,
)


def as_python(cel: str) -> str:
    """Translate CEL to Python. CEL's `!` binds tighter than `not`, so parentheses are required behind it."""
    assert all(found in "(s!" for found in re.findall(r"!(?!=)(.)", cel))
    named = re.sub(r"self\.spec\.\?training\.\?(\w+)\.orValue\(\d+\)", r"\1", cel)
    return re.sub(r"!(?!=)", " not ", named).replace("&&", "and").replace("||", "or")


@settings(max_examples=300)
@given(conditions, st.fixed_dictionaries({name.partition(".")[2]: st.integers(0, 3) for name in FIELDS}))
def test_an_api_server_is_told_what_is_asked_here(condition: str, values: dict[str, int]) -> None:
    spec: Any = SimpleNamespace(training=SimpleNamespace(**values))
    assert bool(eval(as_python(to_cel(condition)), {}, values)) == bool(value_of(condition, spec))
    assert set(fields_of(condition)) == {name for name in FIELDS if name in condition}


@pytest.mark.parametrize(
    ("condition", "cel"),
    [
        ("generation.maxTokens > 1", "self.spec.?generation.?maxTokens.orValue(256) > 1"),
        ("model.lora is None or model.lora.dropout == 0.0",
         "!self.spec.?model.?lora.hasValue() || self.spec.model.lora.dropout == 0.0"),
        ("size(restart.roles) == 0", "self.spec.?restart.?roles.orValue([]).size() == 0"),
        ("matches(restart.id, 'a.')", 'self.spec.?restart.?id.orValue("").matches("a.")'),
        ("starts_with(restart.id, '/')", 'self.spec.?restart.?id.orValue("").startsWith("/")'),
        ("has_part(restart.id, '/', '..')",
         'self.spec.?restart.?id.orValue("").split("/").exists(part, part == "..")'),
    ],
)  # fmt: skip
def test_a_field_is_read_with_its_default_unless_it_is_compared_with_none(condition: str, cel: str) -> None:
    assert to_cel(condition) == cel


def violates(manifest: dict[str, Any]) -> list[str]:
    """Return the fields whose rules a job breaks, or all for one that is invalid earlier."""
    try:
        job = RLHFJob.model_validate(manifest)
    except ValidationError:
        return [rule.field for rule in RULES]
    return [rule.field for rule in RULES if not rule.is_kept(job.spec)]


BROKEN = {field for wrong in all_wrong() if len(found := violates(wrong.manifest)) < len(RULES) for field in found}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.field)
def test_every_rule_is_broken_by_some_job(rule: JobRule) -> None:
    assert rule.field in BROKEN


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.field)
def test_a_rule_is_of_fields_and_its_message_shows_no_value(rule: JobRule) -> None:
    assert all(info_of(path) is not None for path in (rule.field, *fields_of(rule.holds)))
    assert "{" not in rule.message
    assert rule.message


def test_the_definition_has_every_rule() -> None:
    schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    said = [(each["rule"], each["message"]) for each in schema["x-kubernetes-validations"]]
    ours = [(to_cel(rule.holds), rule.message) for rule in RULES]
    ours += [(rule.cel, rule.message) for rule in SOURCES_RULES]
    assert said[: len(ours)] == ours

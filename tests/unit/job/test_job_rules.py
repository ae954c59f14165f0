"""The one table of rules: what a term is worth here is what its text says there, and every rule can be broken."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invalid_jobs import all_wrong
from pydantic import ValidationError

from rlhfspec.cluster.crd import custom_resource_definition
from rlhfspec.job import RLHFJob
from rlhfspec.job.file.rules.sources import SOURCES_RULES
from rlhfspec.job.file.rules.table import RULES, JobRule
from rlhfspec.job.file.rules.terms import Term, field, info_of, is_set
from rlhfspec.job.file.rules.terms import given as given_field

NAMES = ("a", "b", "c")


def atom(name: str) -> Term:
    return Term(name, lambda spec: spec[name], (name,))


numbers = st.recursive(
    st.sampled_from(NAMES).map(atom),
    lambda inner: st.builds(lambda x, y: x + y, inner, inner),
    max_leaves=3,
)
comparisons = st.one_of(
    st.builds(lambda x, y: x >= y, numbers, numbers),
    st.builds(lambda x, y: x <= y, numbers, numbers),
    st.builds(lambda x, y: x < y, numbers, st.integers(0, 3)),
    st.builds(lambda x, y: x.equals(y), numbers, st.integers(0, 3)),
    st.builds(lambda x, y: x.differs_from(y), numbers, numbers),
    st.builds(lambda x, y: x.is_in(y), numbers, st.lists(st.integers(0, 3), max_size=3)),
)
statements = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        st.builds(lambda x, y: x | y, inner, inner),
        st.builds(lambda x, y: x & y, inner, inner),
        st.builds(lambda x: ~x, inner),
    ),
    max_leaves=6,
)


def as_python(cel: str) -> str:
    """CEL's `!` binds more tightly than Python's `not`, which is why a term puts parentheses behind it."""
    return re.sub(r"!(?!=)", " not ", cel).replace("&&", "and").replace("||", "or")


@settings(max_examples=300)
@given(statements, st.fixed_dictionaries({name: st.integers(0, 3) for name in NAMES}))
def test_a_text_says_what_the_term_is_worth(statement: Term, spec: Any) -> None:
    assert bool(eval(as_python(statement.cel), {}, dict(spec))) == bool(statement.value(spec))


@given(statements)
def test_a_negation_stands_before_a_name_or_parentheses(statement: Term) -> None:
    assert all(found in "(ab!c" for found in re.findall(r"!(?!=)(.)", (~statement).cel))


def test_the_second_part_is_not_looked_at_where_the_first_decides() -> None:
    replicas = "roles.generator.replicas"
    job = RLHFJob.model_validate(next(each.manifest for each in all_wrong() if not violates(each.manifest)))
    holds = ~is_set(replicas) | (given_field(f"{replicas}.max") >= given_field(f"{replicas}.min"))
    assert holds.value(job.spec) is True


def violates(manifest: dict[str, Any]) -> list[str]:
    """The fields whose rules a job breaks; of one that is wrong before any rule, all there are."""
    try:
        job = RLHFJob.model_validate(manifest)
    except ValidationError:
        return [rule.field for rule in RULES]
    return [rule.field for rule in RULES if not rule.holds.value(job.spec)]


BROKEN = {field for wrong in all_wrong() if len(found := violates(wrong.manifest)) < len(RULES) for field in found}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.field)
def test_every_rule_is_broken_by_some_job(rule: JobRule) -> None:
    assert rule.field in BROKEN


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.field)
def test_a_rule_is_of_fields_and_its_message_shows_no_value(rule: JobRule) -> None:
    assert all(info_of(path) is not None for path in (rule.field, *rule.holds.fields))
    assert "{" not in rule.message
    assert rule.message


def test_the_definition_has_every_rule() -> None:
    schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    said = [(each["rule"], each["message"]) for each in schema["x-kubernetes-validations"]]
    ours = [(rule.holds.cel, rule.message) for rule in RULES]
    ours += [(rule.cel, rule.message) for rule in SOURCES_RULES]
    assert said[: len(ours)] == ours


def test_a_field_is_read_with_its_default() -> None:
    assert field("generation.maxTokens").cel == "self.spec.?generation.?maxTokens.orValue(256)"
    assert field("model.critic").cel == "self.spec.?model.?critic"

"""CEL rules of the CRD against contradictions and changes of immutable fields."""

from __future__ import annotations

import json
from typing import Any

from rlhfspec.job import Spec
from rlhfspec.job.block import Mark, marked
from rlhfspec.job.cluster import DEFAULT_MANAGER
from rlhfspec.job.file.checks import OWN_LABELS
from rlhfspec.job.file.rules.condition import to_cel
from rlhfspec.job.file.rules.sources import MODULE_MEMBER, NOT_A_MEMBER, PATH, SOURCES_RULES
from rlhfspec.job.file.rules.table import RULES
from rlhfspec.job.file.schema import in_cel

MUTABLE = tuple(marked(Spec, Mark.MUTABLE))
OF_PODS = tuple(marked(Spec, Mark.MUTABLE_WHILE_SUSPENDED))
_HAS_STARTED = "has(oldSelf.status) && has(oldSelf.status.startTime)"
# Blocks with one rule for each field; other blocks have one rule.
_DEEPER = ("roles",)


def job_rules(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the CEL validation rules of the schema's root, which can read both status and spec."""
    return [*_contradictions(), _one_manager(), *_immutable(schema["properties"]["spec"])]


def _one_manager() -> dict[str, Any]:
    """Return the rule that `managedBy` never changes."""
    has, had = _is_there("self", "managedBy"), _is_there("oldSelf", "managedBy")
    default = _text(DEFAULT_MANAGER)
    same = f"({has} ? self.spec.managedBy : {default}) == ({had} ? oldSelf.spec.managedBy : {default})"
    return _rule(same, "cannot be changed; make another job", ".spec.managedBy")


def source_rules() -> list[dict[str, Any]]:
    function = f"self.{in_cel('function')}"
    return [_rule(f"!has({function}) || {function}.matches({_text(MODULE_MEMBER.pattern)})", NOT_A_MEMBER, ".function")]


def template_rules() -> list[dict[str, Any]]:
    own = _text(OWN_LABELS)
    return [
        _rule(
            f"!has(self.{kind}) || self.{kind}.all(name, !name.startsWith({own}))",
            f"{OWN_LABELS}... is reserved for the operator; use another name",
            f".{kind}",
        )
        for kind in ("labels", "annotations")
    ]


def _rule(rule: str, message: str, field: str) -> dict[str, Any]:
    return {"rule": rule, "message": message, "fieldPath": field}


def _text(text: str) -> str:
    return json.dumps(text)


def _contradictions() -> list[dict[str, Any]]:
    of_fields = [_rule(to_cel(rule.holds), rule.message, f".spec.{rule.field}") for rule in RULES]
    return of_fields + [_rule(rule.cel, rule.message, f".{PATH}") for rule in SOURCES_RULES]


def _immutable(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rules against changes after the start, one per field so that the message names it."""
    rules = []
    for path, default in _fields(spec, ""):
        has, had = _is_there("self", path), _is_there("oldSelf", path)
        if default is None:
            same = f"({has}) == ({had}) && (!({has}) || self.spec.{path} == oldSelf.spec.{path})"
        else:  # adding a block with the values that held before changes nothing
            chosen = json.dumps(default)
            same = f"({has} ? self.spec.{path} : {chosen}) == ({had} ? oldSelf.spec.{path} : {chosen})"
        message = "cannot be changed once the job has started; make another job, or change it back"
        if path in OF_PODS:
            same = f"has(self.spec.suspend) && self.spec.suspend || {same}"
            message = "cannot be changed once the job has started, unless it is suspended: set spec.suspend too"
        rules.append(_rule(f"!({_HAS_STARTED}) || ({same})", message, f".spec.{path}"))
    return rules


def _is_there(root: str, path: str) -> str:
    """Return a CEL test that a field is set, with has() at every level because `.?` hides maximum lengths."""
    parts = path.split(".")
    return " && ".join(f"has({root}.spec.{'.'.join(parts[: end + 1])})" for end in range(len(parts)))


def _fields(node: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    """Return (path, default) of immutable fields, two levels deep (roles: three)."""
    found: list[tuple[str, Any]] = []
    for name, field in node["properties"].items():
        path = f"{prefix}{name}"
        if path in MUTABLE or path == "managedBy":  # it has its own rule
            continue
        inner = field.get("properties", {})
        deeper = path.count(".") < (2 if path.startswith(_DEEPER) else 1)
        known = all("type" in child for child in inner.values())
        if inner and deeper and known and path not in OF_PODS and not field.get("nullable"):
            found += _fields(field, f"{path}.")
        else:
            found.append((path, field.get("default")))
    return found

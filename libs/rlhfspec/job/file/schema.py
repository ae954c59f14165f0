"""Schema of a job for editors (JSON Schema) and for Kubernetes (structural OpenAPI v3).

Structural schemas have no references or unions of objects. Sizes are bounded, which limits the cost of rules.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from pydantic.alias_generators import to_camel

from rlhfspec.job import RLHFJob
from rlhfspec.job.choices.algorithms import ALGORITHMS

_KEYS = (
    "type", "description", "default", "enum", "minimum", "maximum", "minLength", "maxLength", "pattern", "minItems",
    "maxItems", "required",
)  # fmt: skip
MOST_CHARACTERS, MOST_ITEMS, MOST_NAMES = 2048, 64, 64  # where a field has no bound of its own
# An API server writes defaults before it evaluates the fields that they depend on.
_DEPENDENT = (("dataset", "promptColumn"),)
QUANTITY = r"^[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+|[numkMGTPE]|[KMGTPE]i)?$"
_NAMED = {
    "type": "array", "maxItems": MOST_ITEMS,
    "items": {
        "type": "object", "required": ["name"], "x-kubernetes-preserve-unknown-fields": True,
        "properties": {"name": {"type": "string", "minLength": 1, "maxLength": 253}},
    },
}  # fmt: skip
_TEXTS = {
    "type": "object", "maxProperties": MOST_NAMES,
    "additionalProperties": {"type": "string", "maxLength": 8192},
}  # fmt: skip
_POD_TEMPLATE = {
    "metadata": {"type": "object", "properties": {"labels": _TEXTS, "annotations": _TEXTS}},
    "spec": {
        "type": "object", "x-kubernetes-preserve-unknown-fields": True,
        "properties": {
            "containers": _NAMED, "initContainers": _NAMED, "volumes": _NAMED,
            "restartPolicy": {"type": "string", "enum": ["Never"]},
        },
    },
}  # fmt: skip


def json_schema() -> dict[str, Any]:
    """Return the schema for editors, without defaults that depend on the algorithm."""
    schema = RLHFJob.model_json_schema(by_alias=True)
    definitions = schema.pop("$defs")
    inlined: dict[str, Any] = _inline(schema, definitions)
    algorithm = inlined["properties"]["spec"]["properties"]["algorithm"]["properties"]
    for name in {to_camel(name) for entry in ALGORITHMS.values() for name in entry.defaults}:
        algorithm[name]["description"] += f" Default: {_defaults_of(name)}."
        del algorithm[name]["default"]
    return inlined


def structural_schema() -> dict[str, Any]:
    schema: dict[str, Any] = _structural(json_schema())
    name = schema["properties"]["metadata"]["properties"]["name"]
    schema["properties"]["metadata"] = {"type": "object", "properties": {"name": name}}  # the rest is the API server's
    spec = schema["properties"]["spec"]["properties"]
    for block, field in _DEPENDENT:
        del spec[block]["properties"][field]["default"]
    for template in pod_templates(spec):
        template["properties"] = copy.deepcopy(_POD_TEMPLATE)
    return schema


def pod_templates(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield spec["podTemplate"]
    for role in spec["roles"]["properties"].values():
        yield role["properties"]["podTemplate"]


def in_cel(name: str) -> str:
    """Return a field's name in a CEL rule, with reserved words escaped."""
    reserved = {"break", "const", "continue", "else", "for", "function", "if", "import", "in", "let", "namespace"}
    return f"__{name}__" if name in reserved | {"loop", "package", "return", "var", "void", "while"} else name


def _defaults_of(camel: str) -> str:
    own = {name: entry.defaults for name, entry in ALGORITHMS.items() if camel in map(to_camel, entry.defaults)}
    block = RLHFJob.model_json_schema(by_alias=True)["$defs"]["Algorithm"]["properties"]
    by_algorithm = [
        f"{name} {_shown(values[key])}" for name, values in own.items() for key in values if to_camel(key) == camel
    ]
    return f"{_shown(block[camel]['default'])}; {', '.join(by_algorithm)}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inline(child, definitions) for child in node]
    if not isinstance(node, dict):
        return node
    reference = node.get("$ref")
    if reference is not None:
        node = definitions[reference.rpartition("/")[2]] | {key: node[key] for key in node if key != "$ref"}
    return {
        key: {name: _inline(field, definitions) for name, field in child.items()}
        if key == "properties"
        else _inline(child, definitions)
        for key, child in node.items()
        if key not in ("title", "discriminator") or not isinstance(child, str | dict)
    }


def _structural(node: dict[str, Any]) -> dict[str, Any]:
    branches = node.get("anyOf") or node.get("oneOf")
    if branches:
        described = {key: node[key] for key in ("description", "default") if node.get(key) is not None}
        return _union([branch for branch in branches if branch.get("type") != "null"], branches) | described
    plain = {
        key: node[key] for key in _KEYS if node.get(key) is not None and not (key == "default" and "properties" in node)
    }
    if "const" in node:
        plain |= {"type": "string", "enum": [node["const"]]}
    for bound, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if bound in node and node[bound] < 1 << 63:  # the API server's integers and bounds are int64
            plain |= {inclusive: node[bound], bound: True}
    names = node.get("propertyNames", {}).get("enum")
    if "properties" in node:
        plain["properties"] = {name: _structural(field) for name, field in node["properties"].items()}
    elif names:
        plain["properties"] = {name: _structural(node["additionalProperties"]) for name in names}
        plain.pop("default", None)
    elif node.get("type") == "object" and isinstance(node.get("additionalProperties"), dict):
        plain["additionalProperties"] = _structural(node["additionalProperties"])
        plain["maxProperties"] = MOST_NAMES
    elif node.get("type") == "object":
        plain["x-kubernetes-preserve-unknown-fields"] = True
    if "items" in node:
        plain["items"] = _structural(node["items"])
        plain.setdefault("maxItems", MOST_ITEMS)
    if plain.get("type") == "string" and "enum" not in plain:
        plain.setdefault("maxLength", MOST_CHARACTERS)
    return plain


def _union(branches: list[dict[str, Any]], with_null: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge branches: null in `with_null` becomes nullable, and objects with different `type` get a rule for each."""
    nullable = {"nullable": True} if len(branches) < len(with_null) else {}
    if len(branches) == 1:
        return _structural(branches[0]) | nullable
    if {branch.get("type") for branch in branches} == {"integer", "string"}:
        return {"x-kubernetes-int-or-string": True, "pattern": QUANTITY, "maxLength": 64, "minimum": 0} | nullable
    if not all("properties" in branch for branch in branches):
        return {"x-kubernetes-preserve-unknown-fields": True} | nullable
    merged: dict[str, Any] = {}
    rules = []
    for branch in branches:
        kind = branch["properties"]["type"]["const"]
        merged = {name: _structural(field) for name, field in branch["properties"].items()} | merged
        for name in branch["required"]:
            if name != "type":
                rule = f"self.type != '{kind}' || has(self.{in_cel(name)})"
                rules.append({"rule": rule, "message": f"is required when type is {kind}", "fieldPath": f".{name}"})
        for name in branch["properties"]:
            merged[name].pop("default", None)  # a default would give one type the fields of another
    kinds = [branch["properties"]["type"]["const"] for branch in branches]
    for name in merged:
        having = [kind for kind, branch in zip(kinds, branches, strict=True) if name in branch["properties"]]
        if len(having) < len(kinds):
            rule = f"self.type in {having} || !has(self.{in_cel(name)})"
            rules.append({"rule": rule, "message": f"is for {' and '.join(having)} only", "fieldPath": f".{name}"})
    merged["type"] = {"type": "string", "enum": kinds}
    return {"type": "object", "properties": merged, "required": ["type"], "x-kubernetes-validations": rules}

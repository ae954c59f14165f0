"""The schema of a job for editors (JSON Schema) and for a Kubernetes custom resource (structural OpenAPI v3).

A structural schema has a type everywhere, no references, no unions of objects and no closed objects: the API server
itself refuses unknown fields. What it cannot say is left to `rlhfspec validate`, which the operator runs too.

Example:
    >>> json_schema()["properties"]["kind"]["const"]
    'RLHFJob'
    >>> structural_schema()["properties"]["spec"]["properties"]["training"]["properties"]["steps"]["minimum"]
    1
"""

from __future__ import annotations

from typing import Any

from pydantic.alias_generators import to_camel

from rlhfspec.job import ALGORITHM_DEFAULTS, RLHFJob

_KEPT = ("type", "description", "default", "enum", "minimum", "maximum", "minLength", "pattern", "minItems", "required")


def json_schema() -> dict[str, Any]:
    """For editors: unknown keys are refused. Defaults that depend on the algorithm are left out."""
    schema = RLHFJob.model_json_schema(by_alias=True)
    definitions = schema.pop("$defs")
    inlined: dict[str, Any] = _inline(schema, definitions)
    algorithm = inlined["properties"]["spec"]["properties"]["algorithm"]["properties"]
    for name in {to_camel(name) for defaults in ALGORITHM_DEFAULTS.values() for name in defaults}:
        # An API server writes defaults into the object before anyone reads the algorithm's name.
        algorithm[name]["description"] += f" Default: {_defaults_of(name)}."
        del algorithm[name]["default"]
    return inlined


def structural_schema() -> dict[str, Any]:
    """For `openAPIV3Schema` of a CustomResourceDefinition."""
    schema: dict[str, Any] = _structural(json_schema())
    schema["properties"]["metadata"] = {"type": "object"}  # the API server's own
    return schema


def _defaults_of(camel: str) -> str:
    own = {name: values for name, values in ALGORITHM_DEFAULTS.items() if camel in map(to_camel, values)}
    block = RLHFJob.model_json_schema(by_alias=True)["$defs"]["Algorithm"]["properties"]
    by_algorithm = [f"{name} {values[key]}" for name, values in own.items() for key in values if to_camel(key) == camel]
    return f"{block[camel]['default']}; {', '.join(by_algorithm)}"


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    """References replaced by what they name: the schema has no cycles."""
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
        key: node[key] for key in _KEPT if node.get(key) is not None and not (key == "default" and "properties" in node)
    }
    if "const" in node:
        plain |= {"type": "string", "enum": [node["const"]]}
    for bound, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if bound in node:
            plain |= {inclusive: node[bound], bound: True}
    if "properties" in node:
        plain["properties"] = {name: _structural(field) for name, field in node["properties"].items()}
    elif node.get("type") == "object" and isinstance(node.get("additionalProperties"), dict):
        plain["additionalProperties"] = _structural(node["additionalProperties"])
    elif node.get("type") == "object":
        plain["x-kubernetes-preserve-unknown-fields"] = True
    if "items" in node:
        plain["items"] = _structural(node["items"])
    return plain


def _union(branches: list[dict[str, Any]], with_null: list[dict[str, Any]]) -> dict[str, Any]:
    """One schema for several: null becomes nullable; objects told apart by `type` become one, with a rule each."""
    nullable = {"nullable": True} if len(branches) < len(with_null) else {}
    if len(branches) == 1:
        return _structural(branches[0]) | nullable
    if not all("properties" in branch for branch in branches):
        return {"x-kubernetes-preserve-unknown-fields": True} | nullable
    merged: dict[str, Any] = {}
    rules = []
    for branch in branches:
        kind = branch["properties"]["type"]["const"]
        merged = {name: _structural(field) for name, field in branch["properties"].items()} | merged
        needed = [f"has(self.{name})" for name in branch["required"] if name != "type"]
        rules.append({"rule": f"self.type != '{kind}' || ({' && '.join(needed)})", "message": f"{kind}: incomplete"})
        for name in branch["properties"]:
            merged[name].pop("default", None)  # would give one kind the fields of another
    kinds = [branch["properties"]["type"]["const"] for branch in branches]
    merged["type"] = {"type": "string", "enum": kinds}
    return {"type": "object", "properties": merged, "required": ["type"], "x-kubernetes-validations": rules}

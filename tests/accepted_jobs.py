"""Jobs that the custom resource's schema accepts, with extreme values; its CEL rules may refuse some."""

from typing import Any

from hypothesis import strategies as st
from invalid_jobs import _around, _fields, edited

from rlhfspec.job.file.schema import structural_schema

FIELDS = {path: node for path, node in _fields(structural_schema()["properties"]["spec"], "") if "." in path}
AMOUNTS = ["0", "1", "1k", "1.0", "1e0", "1e99", "100m", "2Gi", "7E", "3.5", "0.5"]
ODD = st.sampled_from([None, True, -1, 0, 1 << 62, 1e300, "", "x", "0", "\x1b[2J", "worker", "tmp", "ü" * 100, [], {}])
NAMES = [
    "name", "env", "value", "containers", "volumes", "tolerations", "resources", "limits", "nvidia.com/gpu",
    "securityContext", "terminationGracePeriodSeconds", "restartPolicy", "serviceAccountName",
]  # fmt: skip
JSON = st.recursive(
    ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=8,
)


def values(node: dict[str, Any]) -> st.SearchStrategy[Any]:
    made = _plain(node)
    return made | st.none() if node.get("nullable") else made


def _plain(node: dict[str, Any]) -> st.SearchStrategy[Any]:
    if node.get("x-kubernetes-int-or-string"):
        return st.sampled_from([0, 1, 8, 1 << 62, *AMOUNTS])
    if "enum" in node:
        return st.sampled_from(node["enum"])
    if "properties" in node:
        return _block(node)
    if "additionalProperties" in node:
        keys = st.sampled_from(["cpu", "memory", "nvidia.com/gpu", "a", ""])
        return st.dictionaries(keys, values(node["additionalProperties"]), max_size=3)
    of_type = {"array": _items, "string": _text, "integer": _number, "number": _number}
    if (kind := node.get("type")) in of_type:
        return of_type[kind](node)
    return st.booleans() if kind == "boolean" else JSON


def _block(node: dict[str, Any]) -> st.SearchStrategy[Any]:
    required = set(node.get("required", ()))
    fields = {name: values(field) for name, field in node["properties"].items()}
    known = st.fixed_dictionaries(
        {name: made for name, made in fields.items() if name in required},
        optional={name: made for name, made in fields.items() if name not in required},
    )
    if not node.get("x-kubernetes-preserve-unknown-fields"):
        return known
    others = st.dictionaries(st.sampled_from(["env", "tolerations", "hostNetwork", "x"]), JSON, max_size=2)
    return st.builds(lambda a, b: a | b, others, known)


def _items(node: dict[str, Any]) -> st.SearchStrategy[Any]:
    return st.lists(values(node["items"]), min_size=node.get("minItems", 0), max_size=max(node.get("minItems", 0), 3))


def _text(node: dict[str, Any]) -> st.SearchStrategy[str]:
    if "pattern" in node:
        return st.from_regex(node["pattern"], fullmatch=True).filter(lambda text: len(text) <= node["maxLength"])
    return st.sampled_from(["worker", "tmp"]) | st.text(min_size=node.get("minLength", 0), max_size=40)


def _number(node: dict[str, Any]) -> st.SearchStrategy[Any]:
    kind = st.integers if node["type"] == "integer" else st.floats
    least, most = node.get("minimum", -(1 << 63)), node.get("maximum", (1 << 63) - 1)
    if node["type"] == "number":
        least, most = float(node.get("minimum", -1e300)), float(node.get("maximum", 1e300))
    inside = [bound for bound in (least, most) if bound not in _excluded(node)]
    return st.sampled_from(inside) | kind(least, most).filter(lambda x: x not in _excluded(node))


def _excluded(node: dict[str, Any]) -> set[float]:
    pairs = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
    return {node[bound] for bound, flag in pairs if node.get(flag)}


@st.composite
def manifests(draw: st.DrawFn) -> dict[str, Any]:
    chosen = draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=3, unique=True))
    outer = [path for path in chosen if not any(path.startswith(f"{other}.") for other in chosen)]
    edits = {path: draw(values(FIELDS[path])) for path in outer if not path.startswith("rewards.sources")}
    around = {key: value for path in edits for key, value in _around(path).items()}
    return edited(around | {"storage.claim": "runs"} | edits)

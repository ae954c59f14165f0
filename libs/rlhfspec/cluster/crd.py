"""CustomResourceDefinition of RLHFJob, generated from `rlhfspec.job`.

Example:
    >>> crd = custom_resource_definition()
    >>> crd["metadata"]["name"], crd["spec"]["names"]["shortNames"]
    ('rlhfjobs.rlhfspec.io', ['rlhf'])
"""

from __future__ import annotations

from typing import Any

from rlhfspec.cluster import names
from rlhfspec.cluster.crd_rules import job_rules, source_rules, template_rules
from rlhfspec.job.file.schema import MOST_CHARACTERS, pod_templates, structural_schema

_TEXT = {"type": "string", "maxLength": MOST_CHARACTERS}
_LONG_TEXT = {"type": "string", "maxLength": 32768}
_COUNT = {"type": "integer", "minimum": 0}
_NUMBER = {"type": "number"}
_TIME = {"type": "string", "format": "date-time"}
_COLUMNS = (
    ("Phase", "string", ".status.phase", 0),
    ("Step", "string", ".status.progress.shown", 0),
    ("Reward", "number", ".status.progress.reward", 0),
    ("Generators", "integer", ".status.generators", 0),
    ("GPUs", "integer", ".status.gpus", 0),
    ("Reason", "string", ".status.reason", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Message", "string", ".status.message", 1),
)
_JOB_PHASES = (
    "Pending", "Preparing", "Starting", "Running", "Suspending", "Suspended", "Succeeded", "Failed", "Terminating",
)  # fmt: skip


def custom_resource_definition() -> dict[str, Any]:
    version = {
        "name": names.VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _schema()},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.roles.generator.workers",
                "statusReplicasPath": ".status.generators",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "priority": priority}
            for name, kind, path, priority in _COLUMNS
        ],
    }
    called = {"kind": names.KIND, "plural": names.PLURAL, "singular": "rlhfjob"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names.PLURAL}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {**called, "listKind": f"{names.KIND}List", "shortNames": ["rlhf"], "categories": ["rlhfspec"]},
            "versions": [version],
        },
    }


def _schema() -> dict[str, Any]:
    schema = structural_schema()
    schema["properties"]["status"] = _status()
    spec = schema["properties"]["spec"]["properties"]
    # kubectl scale needs an initial number.
    spec["roles"]["default"] = {}
    spec["roles"]["properties"]["generator"]["default"] = {}
    spec["rewards"]["properties"]["sources"]["items"].setdefault("x-kubernetes-validations", []).extend(source_rules())
    for template in pod_templates(spec):
        template["properties"]["metadata"]["x-kubernetes-validations"] = template_rules()
    schema["x-kubernetes-validations"] = job_rules(schema)
    return schema


def _status() -> dict[str, Any]:
    """Return the schema of the status; `selector` and `generators` serve `kubectl scale`."""
    condition = {
        "type": _TEXT, "status": {"type": "string", "enum": ["True", "False", "Unknown"]}, "reason": _TEXT,
        "message": _LONG_TEXT, "lastTransitionTime": _TIME, "observedGeneration": _COUNT,
    }  # fmt: skip
    progress = {
        "step": _COUNT, "totalSteps": _COUNT, "shown": _TEXT, "checkpointStep": _COUNT,
        **dict.fromkeys(("reward", "kl", "tokensPerSecond", "acceptedPerVerification", "etaSeconds"), _NUMBER),
    }  # fmt: skip
    return _block(
        {
            "phase": {"type": "string", "enum": list(_JOB_PHASES)},
            "reason": _TEXT,
            "message": _LONG_TEXT,
            "observedGeneration": _COUNT,
            "conditions": {
                "type": "array",
                "maxItems": 32,
                "items": _block(condition, required=["type", "status"]),
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            },
            "run": _block({"number": _COUNT, "uid": _TEXT, "folder": _TEXT, "restartId": _TEXT}),
            "roles": _map_of(_block(dict.fromkeys(("wanted", "ready", "failed"), _COUNT)), at_most=16),
            "progress": _block(progress),
            "serving": _block({"url": _TEXT, "tokenSecret": _TEXT}),
            "restarts": _block({"total": _COUNT, "counted": _COUNT, "byWorker": _map_of(_COUNT, at_most=5120)}),
            "generators": _COUNT,
            "selector": _TEXT,
            "gpus": _COUNT,
            "startTime": _TIME,
            "completionTime": _TIME,
            # Private state of the operator between reconciles, no interface.
            "internal": {"type": "object", "nullable": True, "x-kubernetes-preserve-unknown-fields": True},
        }
    )


def _block(fields: dict[str, Any], *, required: list[str] | None = None) -> dict[str, Any]:
    return {"type": "object", "properties": fields} | ({"required": required} if required else {})


def _map_of(value: dict[str, Any], *, at_most: int) -> dict[str, Any]:
    """Return the schema of a map, nullable because server-side apply nulls emptied maps."""
    return {"type": "object", "nullable": True, "additionalProperties": value, "maxProperties": at_most}

"""A job in a cluster: checks, the laptop's note, and the CRD. See also e2e/test_crd.py."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from invalid_jobs import JOB, Wrong, all_wrong, edited
from pydantic import ValidationError
from typer.testing import CliRunner

from rlhfspec.cli.main import app
from rlhfspec.cluster import names
from rlhfspec.cluster.crd import custom_resource_definition
from rlhfspec.cluster.crd_rules import MUTABLE
from rlhfspec.job import RLHFJob
from rlhfspec.job.cluster import Role
from rlhfspec.job.file import read_job
from rlhfspec.job.file.checks import check
from rlhfspec.job.file.problems import explain
from rlhfspec.job.file.remarks import left_aside
from rlhfspec.job.file.yaml_text import dotted

CLUSTER = {
    "roles.generator": {
        "workers": 2,
        "replicas": {"min": 1, "max": 4},
        "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "16Gi"}},
        "image": "registry.example/rlhfspec:cuda",
        "podTemplate": {"metadata": {"labels": {"team": "a"}}, "spec": {"nodeSelector": {"gpu": "h200"}}},
    },
    "failurePolicy.rules": [
        {"roles": ["reward"], "exitCodes": [75], "action": "Ignore"},
        {"exitCodes": [75, 3], "action": "FailJob"},
    ],
    "activeDeadlineSeconds": 3600,
    "podTemplate": {"spec": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}},
    "scheduling": {"gang": "kueue", "queue": "team-a", "topologyKey": "kubernetes.io/hostname"},
    "storage": {"claim": "data", "runFolder": "runs/mine"},
    "restart": {"id": "2", "roles": ["reward", "control"]},
}


def fields_refused(manifest: dict[str, Any]) -> list[str]:
    try:
        job = RLHFJob.model_validate(manifest)
    except ValidationError as error:
        return [dotted(path) for path in explain(error, manifest, {})[1]]
    return [finding.field for finding in check(job)]


WRONG = all_wrong()


def test_there_are_enough() -> None:
    assert len(WRONG) > 400
    assert not fields_refused(JOB)
    assert not fields_refused(edited(CLUSTER))


@pytest.mark.parametrize("wrong", [each for each in WRONG if each.by != "server"], ids=str)
def test_what_is_wrong_is_named(wrong: Wrong) -> None:
    refused = fields_refused(wrong.manifest)
    assert any(field.startswith(wrong.field) for field in refused), refused


def test_what_only_an_api_server_refuses_is_too_long_alone() -> None:
    """Local jobs need no bounds on length; nothing else may pass only there."""
    for wrong in WRONG:
        if wrong.by == "server":
            assert len(next(iter(reversed(wrong.edits.values())))) > 64


def test_a_laptop_says_what_it_leaves_aside(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1="}\n')
    manifest = edited(CLUSTER | {"model.path": "tiny:sums", "dataset.path": "train.jsonl"})
    manifest["spec"]["rewards"]["sources"] = [{"type": "function", "function": "rlhfspec.tiny.sums:correct"}]
    file.write_text(json.dumps(manifest))
    line = left_aside(read_job(file))
    assert line == (
        "left aside outside a cluster: activeDeadlineSeconds, scheduling, podTemplate, storage, restart, "
        "failurePolicy.rules, "
        "roles.generator.resources, roles.generator.image, roles.generator.podTemplate, roles.generator.replicas"
    )
    said = CliRunner().invoke(app, ["validate", str(file), "--set", "dataset.path=tiny:sums.jsonl"])
    assert f"remark: {line}" in said.output
    # What the run needs is missing, and only then refused: the line comes first.
    said = CliRunner().invoke(app, ["run", str(file), "--resume", "--out", str(tmp_path / "none")])
    assert said.exit_code == 2
    assert line in said.output.replace("\n", "")


def test_roles_are_those_that_have_a_pod() -> None:
    assert set(get_args(Role)) == set(names.ROLES)


def test_the_definition_bounds_everything() -> None:
    """Otherwise the API server counts the cost of a rule as endless."""

    def walk(node: dict[str, Any], path: str) -> None:
        kind = node.get("type")
        if kind == "string":
            assert {"maxLength", "enum", "format"} & set(node), path
        if kind == "array":
            assert "maxItems" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path
        for name, child in node.get("properties", {}).items():
            walk(child, f"{path}.{name}")
        for key in ("items", "additionalProperties"):
            if isinstance(node.get(key), dict):
                walk(node[key], f"{path}[]")

    walk(schema_of(custom_resource_definition()), "")


def test_every_rule_names_a_field_that_exists() -> None:
    def exists(node: dict[str, Any], path: str) -> bool:
        for name in path.split(".")[1:]:
            node = node["properties"].get(name, {})
        return bool(node)

    schema = schema_of(custom_resource_definition())
    assert all(exists(schema, rule["fieldPath"]) for rule in schema["x-kubernetes-validations"])
    assert all(exists(schema, f".spec.{path}") for path in MUTABLE)


def test_the_printed_definition_is_this_one() -> None:
    printed = CliRunner().invoke(app, ["schema", "--crd"]).output
    assert json.loads(printed) == custom_resource_definition()


def schema_of(crd: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema

"""`helm template` of the chart as a Python function, for tests/processes/chart."""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import ROOT

CHART = ROOT / "charts" / "rlhfspec"
MONITORING = "monitoring.coreos.com/v1"


def found() -> str | None:
    """Return the helm binary: $RLHFSPEC_HELM, from the PATH, or built by the end-to-end tests."""
    sys.path.insert(0, str(ROOT / "e2e"))
    try:
        from cluster.build import binaries_folder
    except ImportError:
        built: Path | None = None
    else:
        built = binaries_folder() / "helm"
    finally:
        sys.path.remove(str(ROOT / "e2e"))
    named = os.environ.get("RLHFSPEC_HELM") or shutil.which("helm")
    return named or (str(built) if built is not None and built.exists() else None)


HELM = found()
needs_helm = pytest.mark.skipif(HELM is None, reason="no helm: set RLHFSPEC_HELM, or put it on the PATH")


REGISTRY = "registry.example/ml"


def template(
    values: dict[str, Any], *more: str, release: str = "rlhfspec", registry: str = REGISTRY
) -> tuple[int, str]:
    """Render the chart, with jobs in the release's namespace unless the values say where."""
    operator = values.get("operator", {})
    if isinstance(operator, dict) and operator.get("scope") != "cluster" and "jobNamespaces" not in operator:
        values = values | {"operator": operator | {"jobNamespaces": ["ml"]}}
    done = subprocess.run(
        [HELM, "template", release, str(CHART), "--namespace", "ml", "--set", f"images.registry={registry}",
         "--values", "-", *more],
        input=json.dumps(values), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stderr if done.returncode else done.stdout


def rendered(values: dict[str, Any] | None = None, *more: str, release: str = "rlhfspec") -> list[dict[str, Any]]:
    return json.loads(json.dumps(_rendered(json.dumps(values or {}), more, release)))  # type: ignore[no-any-return]


@functools.cache
def _rendered(values: str, more: tuple[str, ...], release: str) -> list[dict[str, Any]]:
    code, text = template(json.loads(values), *more, release=release)
    assert code == 0, text
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]


def of_kind(objects: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] in kinds]


def named(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    [one] = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == name]
    return one


def settings(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the file of settings that the chart gives to the operator."""
    return json.loads(named(objects, "ConfigMap", "rlhfspec-operator")["data"]["settings.json"])  # type: ignore[no-any-return]


def pods(objects: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for each in objects:
        pod = each if each["kind"] == "Pod" else each.get("spec", {}).get("template")
        if isinstance(pod, dict) and "containers" in pod.get("spec", {}):
            found.append((f"{each['kind']}/{each['metadata']['name']}", pod))
    return found

"""Writes what the chart takes from the code: `make chart`. With --check it only names what would be written anew.

| file | from |
|---|---|
| values.yaml, values.schema.json, the table of docs/chart.md | values_model.py |
| files/edges.yaml, the table of edges in docs/chart.md | edges.py, so `loop.py` and `cluster/names.py` |
| files/names.yaml | `cluster/names.py` |
| files/rbac.yaml | `rlhfspec.operator.shared.rbac` |
| files/dashboards/*.json | grafana.py |
| files/crd.yaml | `rlhfspec schema --crd` |
| tables of choices in docs | choice_tables.py, so `rlhfspec.job.choices` |
| the fields in docs/job.md | job_fields.py, so the schema of a job |
| stages and records in docs/processes.md | loop_tables.py, so `loop.py` |
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from choice_tables import tables as choice_tables
from edges import as_file, edges, own_edges
from grafana import DASHBOARDS, dashboard
from job_fields import fields_text
from loop_tables import records_table, stages_table
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from values_model import Pod, Resources, Values

from rlhfspec.cluster import names
from rlhfspec.operator.shared import rbac

DASHBOARD_JOBS = [
    {"apiGroups": [names.GROUP], "resources": [names.PLURAL], "verbs": ["list"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
]
DASHBOARD_REVIEWS = [
    {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]},
    {"apiGroups": ["authorization.k8s.io"], "resources": ["subjectaccessreviews"], "verbs": ["create"]},
]
# What people may do with jobs who may view or edit the rest of a namespace.
JOBS_OF_USERS = [names.PLURAL, f"{names.PLURAL}/status", f"{names.PLURAL}/scale"]
USERS = {
    "view": [{"apiGroups": [names.GROUP], "resources": JOBS_OF_USERS, "verbs": ["get", "list", "watch"]}],
    "edit": [
        {
            "apiGroups": [names.GROUP],
            "resources": [names.PLURAL, f"{names.PLURAL}/scale"],
            "verbs": ["create", "update", "patch", "delete", "deletecollection"],
        }
    ],
}
ROOT = Path(__file__).parent.parent
CHART = ROOT / "charts" / "rlhfspec"
DOCUMENT = ROOT / "docs" / "chart.md"
MOST_OF_A_DEFAULT = 120  # characters, in the table


def values_schema() -> str:
    schema = Values.model_json_schema(by_alias=True, mode="validation")
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


def values_text() -> str:
    """values.yaml: the defaults, each behind what it is for."""
    lines = ["# Made by `make chart` from charts/values_model.py; do not edit.", *_lines(Values())]
    return "\n".join(lines).rstrip() + "\n"


def _lines(values: BaseModel, indent: str = "") -> Iterator[str]:
    for name, field in _own_first(type(values)).items():
        value, key = getattr(values, name), field.alias or name
        if key == "global":
            continue
        if field.description:
            yield f"{indent}# {field.description}"
        if isinstance(value, BaseModel) and not isinstance(value, Resources):
            yield f"{indent}{key}:"
            yield from _lines(value, indent + "  ")
        else:
            yield from (indent + line for line in yaml.safe_dump({key: _plain(value)}, sort_keys=False).splitlines())
        if not indent:
            yield ""


def _own_first(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """What components have in common comes after what they are."""
    common = Pod.model_fields if issubclass(model, Pod) else {}
    own = {name: field for name, field in model.model_fields.items() if name not in common}
    return own | {name: model.model_fields[name] for name in common}


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True)
    return [_plain(each) for each in value] if isinstance(value, list) else value


def names_file() -> dict[str, Any]:
    return {
        "managedBy": names.MANAGED_BY, "fieldManager": names.FIELD_MANAGER, "role": names.ROLE, "leader": names.LEADER,
        "name": names.NAME, "component": names.COMPONENT,
        "serviceAccount": names.SERVICE_ACCOUNT,
        "httpPort": names.HTTP_PORT, "reportPort": names.REPORT_PORT, "natsPort": names.NATS_PORT,
        "redisPort": names.REDIS_PORT, "dashboardPort": names.DASHBOARD_PORT, "servePort": names.SERVE_PORT,
    }  # fmt: skip


def _made(text: dict[str, Any]) -> str:
    return "# Made by `make chart`; do not edit.\n" + yaml.safe_dump(text, sort_keys=False, width=120)


def _rows(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """What components have in common is told once."""
    common = Pod.model_fields if issubclass(model, Pod) and model is not Pod else {}
    for name, field in model.model_fields.items():
        if name in common:
            continue
        key = f"{path}{field.alias or name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel) and _is_deep(key):
            yield from _rows(field.annotation, f"{key}.")
        else:
            yield f"| `{key}` | {_default(field)} | {field.description or ''} |"


def _is_deep(key: str) -> bool:
    """Images, resources and priorities are one row each."""
    return not re.fullmatch(r"images\.\w+|.*\.resources|jobs\.priorityClasses", key)


def _default(field: FieldInfo) -> str:
    text = json.dumps(_plain(field.get_default(call_default_factory=True, validated_data={})))
    return f"`{text}`" if len(text) <= MOST_OF_A_DEFAULT else "see values.yaml"


def values_table() -> str:
    return "\n".join(["| value | default | what |", "|---|---|---|", *_rows(Values), *_rows(Pod, "COMPONENT.")])


def edges_table() -> str:
    """One row for all that the same sources reach at the same port."""
    sources: dict[tuple[str, str, str], list[str]] = {}
    for edge in (*edges(), *own_edges()):
        ports = f"{edge.port} to {edge.last}" if edge.last else str(edge.port)
        sources.setdefault((edge.to, ports, edge.why), []).append(edge.source)
    targets: dict[tuple[str, str, str], list[str]] = {}
    for (to, port, why), found in sources.items():
        targets.setdefault((", ".join(found), port, why), []).append(to)
    rows = [f"| {found} | {', '.join(to)} | {port} | {why} |" for (found, port, why), to in sorted(targets.items())]
    return "\n".join(["| from | to | port | what |", "|---|---|---|---|", *rows])


def _document(path: Path, tables: dict[str, str]) -> str:
    text = path.read_text()
    for name, table in tables.items():
        assert f"<!-- {name} -->" in text, f"{path} has no place for the table {name}"
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", lambda at: f"{at[1]}\n{table}\n\n{at[2]}",  # noqa: B023
                      text, flags=re.DOTALL)  # fmt: skip
    return text


def files() -> dict[Path, str]:
    made = {
        CHART / "values.yaml": values_text(),
        CHART / "values.schema.json": values_schema(),
        CHART / "files" / "edges.yaml": _made(as_file()),
        CHART / "files" / "names.yaml": _made(names_file()),
        CHART / "files" / "rbac.yaml": _made(rbac_file()),
        CHART / "files" / "crd.yaml": crd(),
    }
    for name in DASHBOARDS:
        made[CHART / "files" / "dashboards" / f"{name}.json"] = json.dumps(dashboard(name), indent=1) + "\n"
    documents = {
        DOCUMENT: {"values": values_table(), "edges": edges_table()},
        ROOT / "docs" / "job.md": {"fields": fields_text()},
        ROOT / "docs" / "processes.md": {"stages": stages_table(), "records": records_table()},
        **choice_tables(),
    }
    return made | {path: _document(path, tables) for path, tables in documents.items() if path.exists()}


def rbac_file() -> dict[str, Any]:
    gang = {"kueue": "kueue.x-k8s.io", "volcano": "scheduling.volcano.sh", "coscheduling": "scheduling.x-k8s.io"}
    return {
        "install": rbac.as_rules(rbac.INSTALL),
        "release": rbac.as_rules(rbac.RELEASE),
        "reviews": rbac.as_rules(rbac.CLUSTER),
        "kueue": rbac.as_rules(rbac.KUEUE),
        "jobs": rbac.as_rules(rbac.JOBS),
        "gatewayIngress": rbac.as_rules(rbac.GATEWAY_INGRESS),
        "spaces": rbac.as_rules(rbac.SPACES),
        "gang": {name: rbac.as_rules(tuple(r for r in rbac.GANG if r.group == group)) for name, group in gang.items()},
        "users": USERS,
        "dashboard": {"jobs": DASHBOARD_JOBS, "reviews": DASHBOARD_REVIEWS},
    }


def crd() -> str:
    """As `rlhfspec schema --crd` prints it. Kept when the release goes: with it all jobs would go."""
    command = [str(Path(sys.executable).parent / "rlhfspec"), "schema", "--crd"]
    crd = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    crd["metadata"].setdefault("annotations", {})["helm.sh/resource-policy"] = "keep"
    return _made(crd)


def main(arguments: list[str]) -> int:
    stale = [path for path, text in files().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if "--check" not in arguments:
            path.write_text(files()[path])
        print(path.relative_to(ROOT))
    return len(stale) if "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

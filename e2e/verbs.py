"""Who did what, by the API server's audit log, beside what the roles grant: every verb used is granted, every verb
granted is used.

    >>> rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"]}]
    >>> role = {"kind": "Role", "metadata": {"name": "jobs", "namespace": "team"}, "rules": rules}
    >>> bound = {"kind": "RoleBinding", "metadata": {"name": "jobs", "namespace": "team"},
    ...     "roleRef": {"kind": "Role", "name": "jobs"},
    ...     "subjects": [{"kind": "ServiceAccount", "name": "operator", "namespace": "rlhf"}]}
    >>> entry = {"user": {"username": "system:serviceaccount:rlhf:operator"}, "verb": "list",
    ...     "objectRef": {"resource": "pods", "namespace": "team"}, "responseStatus": {"code": 200}}
    >>> unused([role, bound], [entry], "system:serviceaccount:rlhf:operator")
    {('jobs', '', 'pods', 'patch')}
    >>> refused([entry], "system:serviceaccount:rlhf:operator")
    set()

Of a whole run, over the logs of all its clusters:

    E2E_AUDIT=out/audit make e2e
    helm template rlhfspec charts/rlhfspec --namespace rlhf --set images.pullPolicy=Never > out/rendered.yaml
    python e2e/verbs.py --user system:serviceaccount:rlhf:rlhfspec-operator --roles out/rendered.yaml out/audit/*.log
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Json = Mapping[str, Any]
ACCOUNT = "system:serviceaccount:"


@dataclass(frozen=True, slots=True)
class Use:
    """Of a verb. `namespace`: empty for all of them, or for what has none."""

    namespace: str
    group: str
    resource: str  # such as rlhfjobs/status
    verb: str


def resource_of(reference: Json) -> str:
    """
    >>> resource_of({"resource": "rlhfjobs", "subresource": "status"})
    'rlhfjobs/status'
    """
    return "/".join(filter(None, (reference["resource"], reference.get("subresource"))))


def uses(audit: Iterable[Json], user: str, *, allowed: bool = True) -> Iterator[Use]:
    """Of what is an object: the paths that everybody may read, such as /apis, are none."""
    for entry in audit:
        about = entry.get("objectRef", {})
        if entry["user"].get("username") != user or "resource" not in about:
            continue
        is_forbidden = (entry.get("annotations") or {}).get("authorization.k8s.io/decision") == "forbid"
        if is_forbidden is allowed:
            continue
        use = Use(about.get("namespace", ""), about.get("apiGroup", ""), resource_of(about), entry["verb"])
        yield use
        if use.verb == "patch" and entry["responseStatus"]["code"] == 201:
            yield Use(use.namespace, use.group, use.resource, "create")  # an apply of what was not there asks for both


def refused(audit: Iterable[Json], user: str) -> set[Use]:
    """What it asked for and was not granted."""
    return set(uses(audit, user, allowed=False))


def unused(objects: Iterable[Json], audit: Iterable[Json], user: str) -> set[tuple[str, str, str, str]]:
    """Role, group, resource and verb of what was granted and never asked for, in none of the role's namespaces."""
    objects, used = list(objects), set(uses(audit, user))
    roles = {(thing["kind"], _place(thing), thing["metadata"]["name"]): thing for thing in objects if "rules" in thing}
    left: dict[tuple[str, str, str, str], bool] = {}
    for binding in objects:
        if not any(_is(subject, user) for subject in binding.get("subjects") or ()):
            continue
        place, reference = _place(binding), binding["roleRef"]
        role = roles.get((reference["kind"], place if reference["kind"] == "Role" else "", reference["name"]))
        for group, resource, verb in granted(role["rules"] or () if role else ()):
            what = (reference["name"], group, resource, verb)
            is_used = any(
                (use.group, use.resource, use.verb) == what[1:] and (not place or use.namespace == place)
                for use in used
            )
            left[what] = left.get(what, False) or is_used
    return {what for what, is_used in left.items() if not is_used}


def granted(rules: Iterable[Json]) -> Iterator[tuple[str, str, str]]:
    for rule in rules:
        for group in rule.get("apiGroups", ()):
            for resource in rule.get("resources", ()):
                yield from ((group, resource, verb) for verb in rule["verbs"])


def _place(thing: Json) -> str:
    is_everywhere = thing["kind"].startswith("Cluster")
    return "" if is_everywhere else str(thing["metadata"].get("namespace", ""))


def _is(subject: Json, user: str) -> bool:
    if subject["kind"] == "ServiceAccount":
        return user == f"{ACCOUNT}{subject['namespace']}:{subject['name']}"
    return bool(subject["kind"] == "User" and subject["name"] == user)


def bound(kubernetes: Any) -> list[dict[str, Any]]:
    """All roles and bindings of a cluster as they are now."""
    kinds = "roles,rolebindings,clusterroles,clusterrolebindings"
    items: list[dict[str, Any]] = json.loads(kubernetes.kubectl("get", kinds, "-A", "-o", "json"))["items"]
    return items


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--user", required=True)
    parser.add_argument("--roles", type=Path, required=True, help="what the chart renders")
    parser.add_argument("audit", type=Path, nargs="+")
    asked = parser.parse_args()
    with_kinds = [each for each in yaml.safe_load_all(asked.roles.read_text()) if each]
    lines = [line for file in asked.audit for line in file.read_text().splitlines(keepends=True)]
    audit = [json.loads(line) for line in lines if line.endswith("\n")]
    missed, needless = refused(audit, asked.user), unused(with_kinds, audit, asked.user)
    for use in sorted(missed, key=str):
        print(f"asked for and refused: {use}")
    for what in sorted(needless):
        print(f"granted and never used: {' '.join(what)}")
    return 1 if missed or needless else 0


if __name__ == "__main__":
    sys.exit(main())

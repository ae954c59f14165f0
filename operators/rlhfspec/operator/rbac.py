"""What the operator may do, as data: the chart's roles are made from it, and the tests compare it with an audit log.

| rules | bound in |
|---|---|
| JOBS | every namespace with jobs |
| GANG | the same, when jobs use Kueue, Volcano or coscheduling |
| SPACES | the cluster, when the operator's scope is cluster: where a namespace has the label, it makes the rest |
| KUEUE | the cluster, when jobs use Kueue |
| RELEASE | the operator's own namespace |
| CLUSTER | the cluster: a TokenReview has no namespace |
| INSTALL | the operator's own namespace, for the install hook (`keys`) alone |

It never reads a Secret: whose one is that is there already says a patch that tests its owner. Reading what
the API server serves (`/apis`) is granted to everybody by Kubernetes itself.

Example:
    >>> [rule.resources for rule in JOBS if "get" in rule.verbs]
    []
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rlhfspec.cluster import names


@dataclass(frozen=True, slots=True)
class Rule:
    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]


JOBS = (
    Rule(names.GROUP, (names.PLURAL,), ("list", "watch", "delete")),
    Rule(names.GROUP, (f"{names.PLURAL}/status",), ("patch",)),
    Rule("", ("pods",), ("list", "watch", "create", "patch", "delete")),
    Rule("", ("configmaps", "secrets"), ("create", "patch")),
    Rule("", ("events",), ("list", "watch", "create", "patch")),
)
GANG = (
    Rule("scheduling.volcano.sh", ("podgroups",), ("create", "patch")),
    Rule("scheduling.x-k8s.io", ("podgroups",), ("create", "patch")),
    Rule("kueue.x-k8s.io", ("workloads",), ("list", "watch", "create", "delete")),
    Rule("kueue.x-k8s.io", ("workloads/status",), ("patch",)),
)
RELEASE = (
    Rule("coordination.k8s.io", ("leases",), ("get", "create", "update")),
    Rule("", ("pods",), ("list", "patch")),  # the label of who leads
)
# What has no namespace, of Kueue: which nodes a flavor means, and what a priority class is worth.
KUEUE = (
    Rule("kueue.x-k8s.io", ("resourceflavors",), ("list", "watch")),
    Rule("scheduling.k8s.io", ("priorityclasses",), ("list", "watch")),
)
# The chart adds names: only those objects may be patched, and only the role JOBS be bound.
SPACES = (
    Rule("", ("namespaces",), ("list", "watch")),
    Rule("", ("serviceaccounts", "persistentvolumeclaims"), ("create",)),
    Rule("networking.k8s.io", ("networkpolicies",), ("create",)),
    Rule("rbac.authorization.k8s.io", ("rolebindings",), ("create",)),
    Rule("rbac.authorization.k8s.io", ("clusterroles",), ("bind",)),
    Rule("", ("serviceaccounts",), ("patch",)),
    Rule("networking.k8s.io", ("networkpolicies",), ("patch",)),
)
CLUSTER = (Rule("authentication.k8s.io", ("tokenreviews",), ("create",)),)
INSTALL = (Rule("", ("secrets",), ("get", "create")),)


def as_rules(rules: tuple[Rule, ...]) -> list[dict[str, Any]]:
    """As a Role has them.

    >>> as_rules(CLUSTER)
    [{'apiGroups': ['authentication.k8s.io'], 'resources': ['tokenreviews'], 'verbs': ['create']}]
    """
    return [
        {"apiGroups": [said["group"]], "resources": list(said["resources"]), "verbs": list(said["verbs"])}
        for said in map(asdict, rules)
    ]

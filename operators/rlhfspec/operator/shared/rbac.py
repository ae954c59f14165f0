"""Permissions of the operator, from which the roles of the chart are generated.

| rules | bound in |
|---|---|
| JOBS | every namespace with jobs |
| GANG | every namespace with jobs, for Kueue, Volcano or coscheduling |
| GATEWAY_INGRESS | every namespace with jobs, if gateways are exposed |
| SPACES | the cluster, with scope `cluster`, to set up namespaces |
| KUEUE | the cluster, for Kueue |
| RELEASE | the operator's namespace |
| CLUSTER | the cluster, because a TokenReview has no namespace |
| INSTALL | the operator's namespace, for the install hook `keys` |

The operator never reads Secrets of jobs: its patches test the owner or a label instead.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rlhfspec.cluster import names


@dataclass(frozen=True, slots=True)
class PolicyRule:
    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]


JOBS = (
    PolicyRule(names.GROUP, (names.PLURAL,), ("list", "watch", "delete")),
    PolicyRule(names.GROUP, (f"{names.PLURAL}/status",), ("patch",)),
    PolicyRule("", ("pods",), ("list", "watch", "create", "patch", "delete")),
    PolicyRule("", ("configmaps", "secrets", "services"), ("create", "patch")),
    PolicyRule("", ("persistentvolumeclaims",), ("patch",)),  # to test the label of claims that a job names
    PolicyRule("networking.k8s.io", ("networkpolicies",), ("create", "patch")),
    PolicyRule("", ("events",), ("list", "watch", "create", "patch")),
)
GATEWAY_INGRESS = (PolicyRule("networking.k8s.io", ("ingresses",), ("create", "patch")),)
GANG = (
    PolicyRule("scheduling.volcano.sh", ("podgroups",), ("create", "patch")),
    PolicyRule("scheduling.x-k8s.io", ("podgroups",), ("create", "patch")),
    PolicyRule("kueue.x-k8s.io", ("workloads",), ("list", "watch", "create", "delete")),
    PolicyRule("kueue.x-k8s.io", ("workloads/status",), ("patch",)),
)
RELEASE = (
    PolicyRule("coordination.k8s.io", ("leases",), ("get", "create", "update")),
    PolicyRule("", ("pods",), ("list", "patch")),  # labels the leader
)
# Kueue's cluster-scoped kinds: the nodes of a flavor and the value of a priority class.
KUEUE = (
    PolicyRule("kueue.x-k8s.io", ("resourceflavors",), ("list", "watch")),
    PolicyRule("scheduling.k8s.io", ("priorityclasses",), ("list", "watch")),
)
# The chart adds resource names, so that only those objects are patched and only the role JOBS is bound.
SPACES = (
    PolicyRule("", ("namespaces",), ("list", "watch")),
    PolicyRule("", ("serviceaccounts", "persistentvolumeclaims"), ("create",)),
    PolicyRule("networking.k8s.io", ("networkpolicies",), ("create",)),
    PolicyRule("rbac.authorization.k8s.io", ("rolebindings",), ("create",)),
    PolicyRule("rbac.authorization.k8s.io", ("clusterroles",), ("bind",)),
    PolicyRule("", ("serviceaccounts",), ("patch",)),
    PolicyRule("networking.k8s.io", ("networkpolicies",), ("patch",)),
)
CLUSTER = (PolicyRule("authentication.k8s.io", ("tokenreviews",), ("create",)),)
INSTALL = (PolicyRule("", ("secrets",), ("get", "create")),)


def as_rules(rules: tuple[PolicyRule, ...]) -> list[dict[str, Any]]:
    """Return the rules in the form of a Kubernetes Role.

    >>> as_rules(CLUSTER)
    [{'apiGroups': ['authentication.k8s.io'], 'resources': ['tokenreviews'], 'verbs': ['create']}]
    """
    return [
        {"apiGroups": [said["group"]], "resources": list(said["resources"]), "verbs": list(said["verbs"])}
        for said in map(asdict, rules)
    ]

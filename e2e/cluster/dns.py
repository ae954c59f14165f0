"""CoreDNS as pods, one a node: a node that is cut off keeps its names, and NetworkPolicies see it like any pod."""

from __future__ import annotations

from typing import Any

_LABELS = {"k8s-app": "kube-dns"}
_COREFILE = """.:5353 {
  errors
  ready :8181
  kubernetes cluster.local in-addr.arpa {
    pods insecure
  }
  cache 2
}
"""


def objects(address: str) -> list[dict[str, Any]]:
    def of(api: str, kind: str, name: str = "coredns", **rest: Any) -> dict[str, Any]:
        return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "namespace": "kube-system"}, **rest}

    rbac = "rbac.authorization.k8s.io"
    rules = [
        {"apiGroups": [""], "resources": ["endpoints", "services", "pods", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    service = {
        "clusterIP": address,
        "selector": _LABELS,
        "internalTrafficPolicy": "Local",
        "ports": [{"name": each.lower(), "port": 53, "targetPort": 5353, "protocol": each} for each in ("UDP", "TCP")],
    }
    return [
        of("v1", "ServiceAccount"),
        of("v1", "ConfigMap", data={"Corefile": _COREFILE}),
        of(f"{rbac}/v1", "ClusterRole", rules=rules),
        of(
            f"{rbac}/v1",
            "ClusterRoleBinding",
            roleRef={"apiGroup": rbac, "kind": "ClusterRole", "name": "coredns"},
            subjects=[{"kind": "ServiceAccount", "name": "coredns", "namespace": "kube-system"}],
        ),
        of("v1", "Service", "kube-dns", spec=service),
        of("apps/v1", "DaemonSet", spec=_daemon_set()),
    ]


def _daemon_set() -> dict[str, Any]:
    container = {
        "name": "coredns",
        "image": "localhost/coredns:1",
        "args": ["-conf", "/etc/coredns/Corefile"],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns"}],
    }
    pod = {
        "serviceAccountName": "coredns",
        "priorityClassName": "system-cluster-critical",
        "tolerations": [{"operator": "Exists"}],
        # kwok's nodes run nothing
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "type", "operator": "NotIn", "values": ["kwok"]}]}
                    ]
                }
            }
        },
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
    }
    return {"selector": {"matchLabels": _LABELS}, "template": {"metadata": {"labels": _LABELS}, "spec": pod}}

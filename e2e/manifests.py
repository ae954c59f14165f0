"""Small objects for tests, and what became of them."""

from __future__ import annotations

from typing import Any

from cluster.tools import Kubernetes

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def pod(name: str, *command: str, image: str = "localhost/pause:1", **spec: Any) -> dict[str, Any]:
    """Admitted as *restricted*. `container` and `labels` are added to what it is, anything else to its spec."""
    container = {"name": "main", "image": image, "imagePullPolicy": "Never", "securityContext": RESTRICTED}
    container |= {"command": list(command)} if command else {}
    container |= spec.pop("container", {})
    metadata = {"name": name, "labels": {"app": name} | spec.pop("labels", {})}
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container], **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def service(name: str, port: int) -> dict[str, Any]:
    spec = {"selector": {"app": name}, "ports": [{"port": port}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def ends(cluster: Kubernetes, name: str, phase: str = "Succeeded", seconds: int = 120) -> str:
    """Its log, once it has come to that phase."""
    cluster.kubectl("wait", f"pod/{name}", f"--for=jsonpath={{.status.phase}}={phase}", f"--timeout={seconds}s")
    return cluster.kubectl("logs", name)


def policy(name: str, selector: dict[str, Any], **spec: Any) -> dict[str, Any]:
    kinds = [{"ingress": "Ingress", "egress": "Egress"}[each] for each in spec]
    spec = {"podSelector": selector, "policyTypes": kinds, **spec}
    metadata = {"name": name}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}

"""Nodes and pods that are only said to be: kwok answers for them, so that thousands fit in a test.

Pods land on them that select `type: kwok` and tolerate the taint `kwok.x-k8s.io/node`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

TAINT = "kwok.x-k8s.io/node"
LABELS = {"type": "kwok"}


def command(binary: Path, kubeconfig: Path, folder: Path, port: int) -> list[str | Path]:
    stages = folder / "kwok.yaml"
    files = sorted((Path(__file__).parent / "kwok_stages").glob("*.yaml"))
    stages.write_text("\n---\n".join(file.read_text() for file in files))
    options = {
        "kubeconfig": kubeconfig,
        "config": stages,
        "manage-nodes-with-annotation-selector": f"{TAINT}=fake",
        # shorter than the controller-manager's patience: with longer leases nodes are lost and found
        "node-lease-duration-seconds": 8,
        "server-address": f"127.0.0.1:{port}",
    }
    return [binary, *(f"--{name}={value}" for name, value in options.items())]


def node(name: str, *, gpus: int = 0) -> dict[str, Any]:
    """To be created; kwok makes it Ready."""
    room = {"cpu": "64", "memory": "512Gi", "pods": "250"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {TAINT: "fake"},
            "labels": {**LABELS, "kubernetes.io/hostname": name},
        },
        "spec": {"taints": [{"key": TAINT, "value": "fake", "effect": "NoSchedule"}]},
        "status": {"allocatable": room, "capacity": room},
    }

"""Volumes that all nodes share: folders of this machine, as a network file system would be."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any


def mount_small(folder: Path, megabytes: int) -> None:
    """A file system that is soon full; the guardian unmounts it."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)


def shared_volume(folder: Path, name: str, namespace: str, *, size: str = "10Gi") -> list[dict[str, Any]]:
    """A PersistentVolume over `folder` and the ReadWriteMany claim `namespace`/`name` bound to it.

    The size is a number on paper: only a folder within `mount_small` can be full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o777)  # pods run as a user that this machine does not have
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    claim = {"namespace": namespace, "name": name}
    volume = {
        "capacity": {"storage": size},
        "hostPath": {"path": str(folder), "type": "Directory"},
        "persistentVolumeReclaimPolicy": "Retain",
        "claimRef": claim,
    }
    wanted = {"volumeName": f"{namespace}-{name}", "resources": {"requests": {"storage": size}}}
    name = f"{namespace}-{name}"
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": common | volume},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": claim, "spec": common | wanted},
    ]

"""The same tests on `kind`, where there is Docker: E2E_CLUSTER=kind. Real container nodes, and a real network plugin.

What only our own cluster can do is refused by name: the audit log, and devices that fail.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from cluster import gpu, image_set, storage
from cluster.images import Image, write_archive
from cluster.instance import claim
from cluster.tools import Kubernetes


@dataclass(frozen=True)
class KindNode:
    name: str  # of the container, too


class KindCluster(Kubernetes):
    def __init__(
        self,
        instance: int | None = None,
        *,
        nodes: int = 2,
        images: Sequence[str] = (),
        gpus: int = 0,
        policies: bool = True,
        small_volume_mb: int = 0,
    ) -> None:
        if not policies or small_volume_mb:
            raise ValueError("policies, small_volume_mb: not on kind; mark the module's tests `own`")
        self._wanted, self._num_nodes, self._images, self._gpus = instance, nodes, tuple(images), gpus
        self.nodes: list[KindNode] = []

    def __enter__(self) -> KindCluster:
        self.instance, self._lock = claim(self._wanted)
        self.name, self.folder = f"rlhfspec-{self.instance.number}", self.instance.folder
        self._kind("delete", "cluster")
        (self.folder / "volumes").mkdir(parents=True, exist_ok=True)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kind.kubeconfig"

    def stop(self) -> None:
        self._kind("delete", "cluster")
        self._lock.close()

    def load(self, image: Image) -> None:
        archive = write_archive(self.folder / "image.tar", [image])
        self._kind("load", "image-archive", str(archive))

    def volume(self, name: str, namespace: str = "default") -> Path:
        folder = self.folder / "volumes" / namespace / name
        self.apply(*storage.shared_volume(folder, name, namespace))
        return folder

    def cut(self, node: KindNode) -> None:
        subprocess.run(["docker", "network", "disconnect", "kind", node.name], check=True)

    def heal(self, node: KindNode) -> None:
        subprocess.run(["docker", "network", "connect", "kind", node.name], check=True)

    def set_gpus(self, node: KindNode, num: int) -> None:
        path = f"/status/capacity/{gpu.RESOURCE.replace('/', '~1')}"
        patch = json.dumps([{"op": "add", "path": path, "value": str(num)}])
        self.kubectl("patch", "node", node.name, "--subresource=status", "--type=json", "-p", patch)

    def _start(self) -> None:
        mount = {"hostPath": str(self.folder / "volumes"), "containerPath": str(self.folder / "volumes")}
        worker = {"role": "worker", "extraMounts": [mount]}
        nodes = [{"role": "control-plane"}, *[worker] * self._num_nodes]
        config = self.folder / "kind.yaml"
        config.write_text(yaml.safe_dump({"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", "nodes": nodes}))
        self._kind("create", "cluster", "--config", str(config), "--kubeconfig", str(self.kubeconfig), "--wait", "120s")
        for name in ["pause", *self._images]:
            image = image_set.pause() if name == "pause" else image_set.MAKERS[name]()
            self.load(image_set.with_code(image) if image_set.is_ours(image) else image)
        names = [f"{self.name}-worker{number if number > 1 else ''}" for number in range(1, self._num_nodes + 1)]
        self.nodes = [KindNode(name) for name in names]
        for node in self.nodes if self._gpus else []:
            self.set_gpus(node, self._gpus)

    def _kind(self, *args: str) -> None:
        subprocess.run(["kind", *args, "--name", self.name], check=True)

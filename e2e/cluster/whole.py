"""Control plane, nodes, network and names: a cluster that runs pods."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cluster import dns, gpu, image_set, image_store, network, storage
from cluster.control_plane import ControlPlane
from cluster.images import Image, write_archive
from cluster.node import Node
from cluster.processes import last_lines


class Cluster(ControlPlane):
    """
        with Cluster(images=["cpu"], gpus=4) as cluster:
            cluster.kubectl("run", "web", "--image=localhost/pause:1")

    `images`: of "nats", "redis", "slim", "cpu"; pause is always there. Ours hold the code as it is now.
    `gpus`: how many each node claims to have. `policies`: whether NetworkPolicies are enforced.
    `small_volume_mb`: room of the one volume that can be full: `volume(name, small=True)`.
    """

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
        super().__init__(instance, controllers=True, scheduler=True)
        self.nodes: list[Node] = []
        self._num_nodes, self._images, self._gpus, self._policies = nodes, tuple(images), gpus, policies
        self._small_volume_mb = small_volume_mb

    @property
    def address(self) -> str:
        return self.instance.host_address

    def _start(self) -> None:
        if self._small_volume_mb:  # before the nodes: they keep what is mounted when they start
            storage.mount_small(self.folder / "small", self._small_volume_mb)
        network.make_bridge(self.instance)
        numbers = list(range(1, self._num_nodes + 1))
        network.connect(self.instance, numbers)
        self.nodes = [Node(self.instance, number, self.processes) for number in numbers]
        super()._start()
        for node in self.nodes:
            node.join()
        if self._policies:
            namespaces = [f"{node.name}={self.instance.namespace(node.number)}" for node in self.nodes]
            self.start_helper("policies", "cluster.policy_agent", str(self.kubeconfig), *namespaces)
        self.apply(*dns.objects(self.instance.dns_address))
        self._wait_for_nodes(self.nodes)
        for node in self.nodes if self._gpus else []:
            self.start_helper(f"{node.name}-gpu", "cluster.gpu", str(node.device_plugins), str(self._gpus))
        self.kubectl("rollout", "status", "-n", "kube-system", "daemonset/coredns", "--timeout=120s")
        if self._gpus:
            self.wait_for("GPUs to be allocatable", lambda: all(self.gpus(node) == self._gpus for node in self.nodes))

    def _prepare_nodes(self) -> None:
        store, archive = self._prepare_images()
        for node in self.nodes:
            node.configure(self.server, self.authority)
            image_store.copy_store(store, node.folder)
            node.start(archive)

    def _prepare_images(self) -> tuple[Path, Path]:
        """The store that nodes begin with, and the archive of what they import beyond it: names, and our code."""
        always = [image_set.pause(), image_set.coredns()]
        asked = [image_set.MAKERS[name]() for name in self._images]
        # With torch there is one store for whatever is asked: each would have its own copy of 2 GB.
        every = [make() for make in image_set.MAKERS.values()] if any(map(image_set.is_ours, asked)) else asked
        store = image_store.store_of([*always, *every])
        there = frozenset(layer.digest for image in [*always, *every] for layer in image.layers)
        asked = [image_set.with_code(image) if image_set.is_ours(image) else image for image in asked]
        return store, write_archive(self.folder / "images.tar", [*always, *asked], without=there)

    def _wait_for_nodes(self, nodes: list[Node]) -> None:
        for node in nodes:
            self.processes.wait_for(node.name, partial(self._is_node_ready, node), seconds=120)

    def _is_node_ready(self, node: Node) -> bool:
        ready = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        return self.kubectl("get", "node", node.name, "--ignore-not-found", "-o", ready) == "True"

    # What tests do to it

    def cut(self, node: Node) -> None:
        """The node goes on, but nobody hears it."""
        network.cut(self.instance, node.number)

    def heal(self, node: Node) -> None:
        network.heal(self.instance, node.number)

    def load(self, image: Image) -> None:
        """To every node."""
        archive = write_archive(self.folder / "loads" / "image.tar", [image])
        for node in self.nodes:
            import_command = ["ctr", "-a", str(node.containerd_socket), "-n", "k8s.io", "images", "import"]
            network.run(*node.enter(), *import_command, str(archive))

    def volume(self, name: str, namespace: str = "default", *, small: bool = False) -> Path:
        """A ReadWriteMany claim of that name; returns the folder of this machine that pods see in it."""
        folder = self.folder / ("small" if small else "volumes") / namespace / name
        self.apply(*storage.shared_volume(folder, name, namespace))
        return folder

    def gpus(self, node: Node) -> int:
        """Healthy ones, as Kubernetes knows of them."""
        return int(self.get("node", node.name)["status"].get("allocatable", {}).get(gpu.RESOURCE, 0))

    def set_gpus(self, node: Node, num: int) -> None:
        """Fewer than before: the others are broken."""
        (node.device_plugins / "gpus").write_text("".join(f"gpu{number}\n" for number in range(num)))

    def logs_of(self, node: Node, part: str = "kubelet") -> str:
        return last_lines(node.folder / f"{part}.log", 200)

    def start_helper(self, name: str, module: str, *args: str) -> None:
        """A module of this package as a process of the cluster."""
        environment = {"PYTHONPATH": str(Path(__file__).parent.parent)}
        self.processes.start(name, [sys.executable, "-m", module, *args], environment=environment)

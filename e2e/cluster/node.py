"""A node: containerd, kubelet and kube-proxy in namespaces of their own. What happens in them says node.sh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster import pki
from cluster.build import binaries_folder
from cluster.instance import Instance
from cluster.processes import Processes

CONTAINERD = """
version = 2
root = "{folder}/containerd"
state = "{folder}/containerd-state"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.tracing.processor.v1.otlp"]
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  # Without: every sandbox fails, for lack of the right to lower its own score.
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
"""


class Node:
    """Number from 1; `name` is what Kubernetes calls it."""

    def __init__(self, instance: Instance, number: int, processes: Processes) -> None:
        self.instance, self.number, self._processes = instance, number, processes
        self.name = f"node{number}"
        self.folder = instance.folder / self.name

    @property
    def address(self) -> str:
        return self.instance.node_address(self.number)

    @property
    def device_plugins(self) -> Path:
        """Where device plugins meet the kubelet."""
        return self.folder / "device-plugins"

    @property
    def containerd_socket(self) -> Path:
        return self.folder / "containerd.sock"

    def configure(self, server: str, authority: pki.Authority) -> None:
        self.folder.mkdir()
        user = f"system:node:{self.name}"
        keys = authority.issue(self.name, user, group="system:nodes", hosts=(self.address, self.name))
        pki.write_kubeconfig(self.folder / "kubelet.kubeconfig", server, authority, keys)
        proxy = authority.issue(f"{self.name}-proxy", "system:kube-proxy")
        pki.write_kubeconfig(self.folder / "kube-proxy.kubeconfig", server, authority, proxy)
        (self.folder / "address").write_text(self.address)
        (self.folder / "resolv.conf").write_text("")  # pods have the cluster's names and no others
        (self.folder / "containerd.toml").write_text(CONTAINERD.format(folder=self.folder))
        (self.folder / "kubelet.json").write_text(json.dumps(self._kubelet(authority, keys)))
        (self.folder / "kube-proxy.json").write_text(json.dumps(self._kube_proxy()))
        (self.folder / "cni").mkdir()
        (self.folder / "cni" / "10-bridge.conflist").write_text(json.dumps(self._pod_network()))

    def start(self, images: Path) -> None:
        """Up to the imported images: the rest, which needs the API server, waits for `join`."""
        command: list[str | Path] = ["nsenter", f"--net=/run/netns/{self.instance.namespace(self.number)}"]
        command += ["unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = Path(__file__).parent / "node.sh"
        command += ["bash", script, self.folder, self.instance.cgroup(self.number), binaries_folder(), images]
        self._processes.start(self.name, command)

    def join(self) -> None:
        (self.folder / "join").touch()

    def enter(self) -> list[str]:
        """The command line that runs another in this node's namespaces."""
        init = _only_child(self._processes.number_of(self.name))
        return ["nsenter", f"--target={init}", "--mount", "--pid", "--net"]

    def _kubelet(self, authority: pki.Authority, keys: tuple[Path, Path]) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "readOnlyPort": 0,
            "healthzPort": 0,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(authority.certificate_file)},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(keys[0]),
            "tlsPrivateKeyFile": str(keys[1]),
            "containerRuntimeEndpoint": f"unix://{self.containerd_socket}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.instance.cgroup(self.number)}",
            "failSwapOn": False,
            "failCgroupV1": False,
            "oomScoreAdj": 0,
            "maxOpenFiles": 20000,
            "clusterDNS": [self.instance.dns_address],
            "clusterDomain": "cluster.local",
            "resolvConf": str(self.folder / "resolv.conf"),
            "podLogsDir": str(self.folder / "pod-logs"),
            "volumePluginDir": str(self.folder / "volume-plugins"),
            # A node that is cut off is noticed in seconds, and one that is back too.
            "nodeStatusUpdateFrequency": "2s",
            "nodeLeaseDurationSeconds": 8,
            "configMapAndSecretChangeDetectionStrategy": "Watch",
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "evictionHard": {"nodefs.available": "1%", "memory.available": "100Mi"},
            "shutdownGracePeriod": "0s",
        }

    def _kube_proxy(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "clientConnection": {"kubeconfig": str(self.folder / "kube-proxy.kubeconfig")},
            "clusterCIDR": self.instance.pod_subnets,
            "hostnameOverride": self.name,
            # Its limits are the whole machine's, not this node's.
            "conntrack": {"maxPerCore": 0},
            "iptables": {"minSyncPeriod": "0s"},
        }

    def _pod_network(self) -> dict[str, Any]:
        addresses = {
            "type": "host-local",
            "ranges": [[{"subnet": self.instance.pod_subnet(self.number)}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": str(self.folder / "addresses"),
        }
        bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True, "ipam": addresses}
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, ports]}


def _only_child(number: int) -> int:
    return int(Path(f"/proc/{number}/task/{number}/children").read_text().split()[0])

"""etcd, API server, controller-manager and scheduler, as processes of this machine."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster import kueue, kwok, pki
from cluster.build import binaries_folder
from cluster.guardian import Guardian, clean
from cluster.instance import claim, free_ports
from cluster.processes import Processes
from cluster.tools import Kubernetes

_HOSTS = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
# Every request, but not what it carried: who did what to which kind, to compare with what was granted.
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}


class ControlPlane(Kubernetes):
    """A Kubernetes without nodes, on 127.0.0.1: enough for custom resources, admission, RBAC and an operator.

        with ControlPlane() as kubernetes:
            kubernetes.kubectl("apply", "-f", "crd.yaml")

    `controllers=True` adds the controller-manager (namespaces get deleted and have service accounts, owners' objects
    are collected); without it, objects that are owned stay.
    """

    def __init__(self, instance: int | None = None, *, controllers: bool = True, scheduler: bool = False) -> None:
        self._wanted, self._controllers, self._scheduler = instance, controllers, scheduler
        self._guardian: Guardian | None = None

    def __enter__(self) -> ControlPlane:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self.instance, lock = claim(self._wanted)
        clean(self.instance)
        self.folder = self.instance.folder
        self.folder.mkdir(parents=True)
        self._guardian = Guardian(self.instance, lock)
        self.processes = Processes(self.folder)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        if self._guardian is not None:
            self._keep_audit()
            self._guardian.finish()
            self._guardian = None
            self.processes.reap()

    # What tests use

    @property
    def kubeconfig(self) -> Path:
        """Of the cluster's administrator."""
        return self.folder / "admin.kubeconfig"

    def kubeconfig_of(self, name: str, *, group: str = "") -> Path:
        """For a user of that name; it may do nothing until RBAC says so. `group` as in `system:masters`."""
        files = self.authority.issue(f"user-{name.replace(':', '-')}", name, group=group)
        return pki.write_kubeconfig(self.folder / f"user-{name}.kubeconfig", self.server, self.authority, files)

    def audit(self, namespace: str = "", *, since: int = 0) -> Iterator[dict[str, Any]]:
        """Every request that the API server has answered, oldest first: verb, user, objectRef, responseStatus, ...
        `namespace`: only those about what is in it. `since`: what `audit_bytes()` was then."""
        part = f'"namespace":"{namespace}"' if namespace else ""
        with (self.folder / "audit.log").open() as lines:
            lines.seek(since)
            yield from (json.loads(line) for line in lines if part in line and line.endswith("\n"))

    def audit_bytes(self) -> int:
        return (self.folder / "audit.log").stat().st_size

    def start_kwok(self, num: int, *, gpus: int = 0) -> None:
        """Adds `num` nodes kwok1, kwok2, ... that only pretend: see kwok.py for how pods land there."""
        binary = binaries_folder() / "kwok"
        self.processes.start("kwok", kwok.command(binary, self.kubeconfig, self.folder, free_ports(1)[0]))
        self.apply(*(kwok.node(f"kwok{number}", gpus=gpus) for number in range(1, num + 1)))

    def start_kueue(self) -> None:
        """See kueue.py; `why_no_kueue` says whether it is here."""
        kueue.start(self)

    def stop_api_server(self) -> None:
        self.processes.kill("kube-apiserver")

    def start_api_server(self) -> None:
        self.processes.start("kube-apiserver", self._api_server_command())
        self.processes.wait_for("kube-apiserver", self._is_ready)

    def compact_etcd(self) -> None:
        """What was before now is forgotten: who watches from there is told that it is gone (410)."""
        revision = self._ask_etcd("range", {"key": "eA=="})["header"]["revision"]
        self._ask_etcd("compaction", {"revision": revision, "physical": True})

    def _ask_etcd(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        asked = urllib.request.Request(f"http://127.0.0.1:{self._etcd_port}/v3/kv/{what}", json.dumps(body).encode())
        with urllib.request.urlopen(asked, timeout=20) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found

    def _keep_audit(self) -> None:
        """Where somebody asks for it (E2E_AUDIT=FOLDER): verbs.py compares the logs of a whole run with the roles."""
        folder, log = os.environ.get("E2E_AUDIT"), self.folder / "audit.log"
        if folder and log.exists():
            Path(folder).mkdir(parents=True, exist_ok=True)
            shutil.copy(log, Path(folder) / f"audit-{self.instance.number}-{time.time_ns()}.log")

    # How it starts

    def _start(self) -> None:
        self._make_keys()
        self._etcd_port, self._etcd_peer_port, self._port, kcm_port, scheduler_port = free_ports(5)
        self._start_etcd()
        self._prepare_nodes()
        self.start_api_server()
        # Not before the API server is ready: without its own RBAC roles the controller-manager exits for good.
        if self._controllers:
            self.processes.start("kube-controller-manager", self._controller_manager_command(kcm_port))
        if self._scheduler:
            self.processes.start("kube-scheduler", self._scheduler_command(scheduler_port))

    def _prepare_nodes(self) -> None:
        """What of them can start before there is an API server; a control plane alone has none."""

    @property
    def address(self) -> str:
        return "127.0.0.1"

    @property
    def server(self) -> str:
        return f"https://{self.address}:{self._port}"

    def _make_keys(self) -> None:
        self.keys = self.folder / "keys"
        self.keys.mkdir()
        self.authority = pki.Authority(self.keys, "ca")
        front = pki.Authority(self.keys, "front-proxy-ca")
        front.issue("front-proxy-client", "front-proxy-client")
        addresses = ("127.0.0.1", self.instance.host_address, self.instance.api_service_address)
        self.authority.issue("apiserver", "kube-apiserver", hosts=(*addresses, *_HOSTS))
        self.authority.issue("kubelet-client", "kube-apiserver-kubelet-client", group="system:masters")
        pki.write_service_account_keys(self.keys)

    def _kubeconfig(self, name: str, user: str, *, group: str = "") -> Path:
        path = self.folder / f"{name}.kubeconfig"
        if not path.exists():
            pki.write_kubeconfig(path, self.server, self.authority, self.authority.issue(name, user, group=group))
        return path

    def _start_etcd(self) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd_port, self._etcd_peer_port))
        command: list[str | Path] = [binaries_folder() / "etcd", f"--data-dir={self.folder}/etcd", "--unsafe-no-fsync"]
        command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        self.processes.start("etcd", [*command, f"--initial-cluster=default={peer}", "--log-level=warn"])

    def _api_server_command(self) -> list[str | Path]:
        keys, instance = self.keys, self.instance
        self._kubeconfig("admin", "admin", group="system:masters")
        (self.folder / "audit-policy.json").write_text(json.dumps(_AUDIT_POLICY))
        options = {
            "etcd-servers": f"http://127.0.0.1:{self._etcd_port}",
            "bind-address": self.address,
            "advertise-address": self.address,
            # 127.0.0.1 is no address for the endpoints of the Service `kubernetes`
            "endpoint-reconciler-type": "none" if self.address == "127.0.0.1" else "master-count",
            "secure-port": self._port,
            "tls-cert-file": keys / "apiserver.crt",
            "tls-private-key-file": keys / "apiserver.key",
            "client-ca-file": keys / "ca.crt",
            "cert-dir": keys,
            "kubelet-client-certificate": keys / "kubelet-client.crt",
            "kubelet-client-key": keys / "kubelet-client.key",
            "kubelet-certificate-authority": keys / "ca.crt",
            "kubelet-preferred-address-types": "InternalIP",
            "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",
            "allow-privileged": "true",
            "service-cluster-ip-range": instance.services,
            "service-account-issuer": "https://kubernetes.default.svc.cluster.local",
            "service-account-key-file": keys / "sa.pub",
            "service-account-signing-key-file": keys / "sa.key",
            "requestheader-client-ca-file": keys / "front-proxy-ca.crt",
            "requestheader-allowed-names": "front-proxy-client",
            "requestheader-extra-headers-prefix": "X-Remote-Extra-",
            "requestheader-group-headers": "X-Remote-Group",
            "requestheader-username-headers": "X-Remote-User",
            "proxy-client-cert-file": keys / "front-proxy-client.crt",
            "proxy-client-key-file": keys / "front-proxy-client.key",
            "audit-policy-file": self.folder / "audit-policy.json",
            "audit-log-path": self.folder / "audit.log",
        }
        return [binaries_folder() / "kube-apiserver", *(f"--{name}={value}" for name, value in options.items())]

    def _is_ready(self) -> bool:
        context = ssl.create_default_context(cafile=str(self.authority.certificate_file))
        context.load_cert_chain(self.keys / "admin.crt", self.keys / "admin.key")
        try:
            with urllib.request.urlopen(f"{self.server}/readyz", context=context, timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def _controller_manager_command(self, port: int) -> list[str | Path]:
        options = {
            **self._options_of_a_client("kube-controller-manager", port),
            "use-service-account-credentials": "true",
            "root-ca-file": self.keys / "ca.crt",
            "service-account-private-key-file": self.keys / "sa.key",
            "cluster-signing-cert-file": self.keys / "ca.crt",
            "cluster-signing-key-file": self.keys / "ca.key",
            # A node that is cut off is noticed in seconds, not in 40.
            "node-monitor-grace-period": "8s",
            "node-monitor-period": "1s",
            # A claim that came a moment before its volume is bound in a second, not in 15 or 30.
            "pvclaimbinder-sync-period": "1s",
        }
        name = binaries_folder() / "kube-controller-manager"
        return [name, *(f"--{option}={value}" for option, value in options.items())]

    def _options_of_a_client(self, name: str, port: int) -> dict[str, Any]:
        """Of a process that works on what the API server has."""
        config = self._kubeconfig(name, f"system:{name}")
        return {
            **dict.fromkeys(("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"), config),
            "bind-address": "127.0.0.1",
            "secure-port": port,
            "cert-dir": self.keys,
            "leader-elect": "false",
            "kube-api-qps": 500,
            "kube-api-burst": 1000,
        }

    def _scheduler_command(self, port: int) -> list[str | Path]:
        options = self._options_of_a_client("kube-scheduler", port)
        return [binaries_folder() / "kube-scheduler", *(f"--{name}={value}" for name, value in options.items())]

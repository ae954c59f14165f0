"""Kueue itself, as a process of this machine: its controllers, its scheduler and its own webhooks, whose addresses are
on 127.0.0.1 in place of a Service.

    queue("team", "gpus", labels={"pool": "a100"}, tolerations=[], cpu="8")    # what an administrator makes

Its certificates are ours: it finds a Secret that needs no new ones, and tells the API server of them as it always does.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from cluster import pki
from cluster.build import folder_of
from cluster.instance import free_ports

if TYPE_CHECKING:
    from cluster.control_plane import ControlPlane

NAMESPACE, SECRET, SERVICE = "kueue-system", "kueue-webhook-server-cert", "kueue-webhook-service"
GROUP, VERSION = "kueue.x-k8s.io", "kueue.x-k8s.io/v1beta2"
Json = dict[str, Any]


def start(plane: ControlPlane) -> None:
    """Until it may be asked: its webhooks answer, and its kinds are served."""
    folder = plane.folder / "kueue"
    folder.mkdir()
    webhooks, health = free_ports(2)
    plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    plane.apply(_secret(folder), *_kinds(webhooks), *_webhooks(webhooks))
    (folder / "config.json").write_text(json.dumps(_configuration(folder, webhooks, health)))
    environment = {"KUBECONFIG": str(plane.kubeconfig)}
    command = [folder_of("kueue") / "kueue", f"--config={folder}/config.json", "--zap-log-level=2"]
    plane.processes.start("kueue", command, environment=environment)
    plane.processes.wait_for("kueue", lambda: _is_ready(health))


def queue(namespace: str, name: str, *, labels: dict[str, str], tolerations: list[Json], **quota: str) -> list[Json]:
    """A LocalQueue with a ClusterQueue and a flavor of its own, of the same name. Higher priorities preempt."""
    quotas = [{"name": resource, "nominalQuota": amount} for resource, amount in quota.items()]
    group = {"coveredResources": list(quota), "flavors": [{"name": name, "resources": quotas}]}
    cluster_queue = {
        "namespaceSelector": {},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [group],
    }
    return [
        _thing("ResourceFlavor", name, {"nodeLabels": labels, "tolerations": tolerations}),
        _thing("ClusterQueue", name, cluster_queue),
        _thing("LocalQueue", name, {"clusterQueue": name}, namespace),
    ]


def _thing(kind: str, name: str, spec: Json, namespace: str = "") -> Json:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": VERSION, "kind": kind, "metadata": metadata, "spec": spec}


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _configuration(folder: Path, webhooks: int, health: int) -> Json:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": webhooks, "certDir": str(folder)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": True, "webhookServiceName": SERVICE, "webhookSecretName": SECRET},
        "integrations": {"frameworks": ["batch/job"]},
        "featureGates": {"VisibilityOnDemand": False},
    }


def _secret(folder: Path) -> Json:
    """As Kueue keeps it; `folder` has what of it a pod would mount."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    authority = pki.Authority(folder, "ca", hosts=("kueue-ca",), key=key)
    files = authority.issue("tls", SERVICE, hosts=("127.0.0.1", f"{SERVICE}.{NAMESPACE}.svc"))
    form = serialization.PrivateFormat.TraditionalOpenSSL  # the only one that it reads
    data = {
        "ca.crt": authority.pem,
        "ca.key": key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()),
    } | {file.name: file.read_bytes() for file in files}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": SECRET, "namespace": NAMESPACE},
        "data": {name: base64.b64encode(value).decode() for name, value in data.items()},
    }


def _kinds(port: int) -> list[Json]:
    """Of two versions each: Kueue turns one into the other."""
    files = sorted((folder_of("kueue") / "components" / "crd" / "bases").glob(f"{GROUP}_*.yaml"))
    kinds: list[Json] = [yaml.safe_load(file.read_text()) for file in files]
    client = {"url": f"https://127.0.0.1:{port}/convert"}
    for kind in kinds:
        if len(kind["spec"]["versions"]) > 1:
            webhook = {"clientConfig": client, "conversionReviewVersions": ["v1"]}
            kind["spec"]["conversion"] = {"strategy": "Webhook", "webhook": webhook}
    return kinds


def _webhooks(port: int) -> list[Json]:
    """Those of Kueue's own kinds."""
    text = (folder_of("kueue") / "components" / "webhook" / "manifests.yaml").read_text()
    configurations: list[Json] = [each for each in yaml.safe_load_all(text) if each]
    for each in configurations:
        each["metadata"]["name"] = f"kueue-{each['metadata']['name']}"
        each["webhooks"] = [hook for hook in each["webhooks"] if hook["rules"][0]["apiGroups"] == [GROUP]]
        for hook in each["webhooks"]:
            path = hook["clientConfig"].pop("service")["path"]
            hook["clientConfig"]["url"] = f"https://127.0.0.1:{port}{path}"
    return configurations

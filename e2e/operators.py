"""Operators as processes of this machine, against a control plane without nodes: the tests play the kubelet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import yaml
from cluster import ControlPlane
from kubernetes import client
from shared_servers import SharedServers, free_port
from verbs import resource_of

from rlhfspec.cluster import names
from rlhfspec.cluster.crd import custom_resource_definition
from rlhfspec.operator.shared import rbac

ROOT = Path(__file__).parent.parent
RELEASE, RELEASE_NAMESPACE, USER = "rl", "rlhf", "operator"
T = TypeVar("T")


def until(found: Callable[[], T], what: str, *, seconds: float = 60.0) -> T:
    """What it found, once that is something."""
    end = time.monotonic() + seconds
    while True:
        if answer := found():
            return answer
        assert time.monotonic() < end, f"waited {seconds} s in vain: {what}"
        time.sleep(0.05)


class Operator:
    """One replica. `kubeconfig`: who it is; `more`: settings."""

    def __init__(
        self, folder: Path, kubeconfig: Path, servers: SharedServers, *, namespaces: tuple[str, ...],
        pod: str = "", release: str = RELEASE, scope: str = "namespaced", redis: bool = False, **more: Any,
    ) -> None:  # fmt: skip
        self.folder, self.http, self.reports = folder, free_port(), free_port()
        folder.mkdir(parents=True)
        settings: dict[str, Any] = {
            "network_policies": True,
            "release": release,
            "namespace": RELEASE_NAMESPACE,
            "scope": scope,
            "job_namespaces": namespaces,
            "images": {"slim": "rlhfspec:slim", "cpu": "rlhfspec:cpu", "cuda": "rlhfspec:cuda"},
            "claim": "shared",
            "nats_url": servers.nats_url,
            "redis_url": servers.redis_url if redis else None,
            "report_url": f"https://127.0.0.1:{self.reports}",
            **more,
        }
        (folder / "settings.json").write_text(json.dumps(settings))
        self.servers, self.kubeconfig, self.pod = servers, kubeconfig, pod
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "rlhfspec.operator", "--settings", self.folder / "settings.json"]
        command += ["--keys", self.servers.release_credentials("keys")]
        command += ["--tls", self.servers.release_credentials("operator-tls"), "--host", "127.0.0.1"]
        command += ["--http-port", self.http, "--report-port", self.reports]
        environment = os.environ | {
            "KUBECONFIG": str(self.kubeconfig),
            "RLHFSPEC_POD": self.pod,
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log, env=environment)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        self.process.wait(30)

    def kill(self, sent: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(sent)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def metrics(self) -> dict[str, float]:
        """By name, labels included."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except (urllib.error.URLError, ConnectionError):
            return {}
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    @property
    def acts(self) -> bool:
        return self.metrics().get("rlhfspec_operator_leader") == 1.0

    @property
    def num_writes(self) -> int:
        return int(
            sum(
                value for name, value in self.metrics().items() if name.startswith("rlhfspec_operator_api_writes_total")
            )
        )

    @property
    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))

    @property
    def waiting_seconds(self) -> float:
        """Return how long its threads have waited for a processor since they began, in sum."""
        waiting = 0.0
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            with suppress(OSError):  # it has ended meanwhile
                waiting += int((thread / "schedstat").read_text().split()[1]) / 1e9
        return waiting

    @property
    def cpu_seconds(self) -> float:
        """Of the process, since it began."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def stopped_at_the_end(*operators: Operator) -> Iterator[None]:
    try:
        yield
    finally:
        for operator in operators:
            operator.stop()


@contextmanager
def acting(operator: Operator) -> Iterator[Operator]:
    """Once it acts, until the end."""
    with stopped_at_the_end(operator):
        until(lambda: operator.acts, "it acts")
        yield operator


class World:
    """What the tests do as users and as the kubelet."""

    def __init__(self, kubernetes: ControlPlane) -> None:
        self.kubernetes = kubernetes
        self.core = client.CoreV1Api(kubernetes.client())
        self.jobs = client.CustomObjectsApi(kubernetes.client())

    def namespace(self, name: str) -> str:
        """With the service account of the jobs' pods."""
        body = {"metadata": {"name": name}}
        self.core.create_namespace(body)
        self.core.create_namespaced_service_account(name, {"metadata": {"name": names.SERVICE_ACCOUNT}})
        return name

    def apply(self, namespace: str, name: str, spec: Mapping[str, Any] | None = None, **metadata: Any) -> None:
        job = example(name)
        job["metadata"] |= {"namespace": namespace} | metadata
        job["spec"] |= spec or {}
        self.kubernetes.apply(job)

    def job(self, namespace: str, name: str) -> dict[str, Any] | None:
        try:
            body: dict[str, Any] = self.jobs.get_namespaced_custom_object(
                names.GROUP, names.VERSION, namespace, names.PLURAL, name
            )
            return body
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise

    def status(self, namespace: str, name: str) -> dict[str, Any]:
        return (self.job(namespace, name) or {}).get("status", {})

    def pods(self, namespace: str) -> dict[str, Any]:
        return {pod.metadata.name: pod for pod in self.core.list_namespaced_pod(namespace).items}

    def wait_for_phase(self, namespace: str, name: str, phase: str) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            status = self.status(namespace, name)
            return status if status.get("phase") == phase else None

        return until(there, f"{namespace}/{name} is {self.status(namespace, name)}, not {phase}")

    def wait_for_reason(self, namespace: str, name: str, reason: str) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            status = self.status(namespace, name)
            return status if status.get("reason") == reason else None

        return until(there, f"{namespace}/{name} says {self.status(namespace, name)}, not {reason}")

    def wait_for_pods(self, namespace: str, wanted: set[str]) -> None:
        until(lambda: set(self.pods(namespace)) == wanted, f"pods {sorted(wanted)}, not {sorted(self.pods(namespace))}")

    def runs(self, namespace: str, pod: str) -> None:
        """As the kubelet says it of a pod that is ready."""
        self._becomes(namespace, pod, "Running", {"running": {"startedAt": now()}}, ready=True)

    def ends(self, namespace: str, pod: str, code: int = 0, message: str = "") -> None:
        ended = {"exitCode": code, "message": message, "reason": "Error" if code else "Completed", "finishedAt": now()}
        self._becomes(namespace, pod, "Failed" if code else "Succeeded", {"terminated": ended}, ready=False)

    def _becomes(self, namespace: str, pod: str, phase: str, state: dict[str, Any], *, ready: bool) -> None:
        container = {"name": "worker", "state": state, "ready": ready, "image": "", "imageID": "", "restartCount": 0}
        condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": now()}
        status = {"phase": phase, "containerStatuses": [container], "conditions": [condition]}
        self.core.patch_namespaced_pod_status(pod, namespace, {"status": status})


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def example(name: str) -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "grpo.yaml").read_text())
    job["metadata"] = {"name": name}
    return job


def stages_of(world: World, namespace: str, job: str) -> set[str]:
    """The pods of a job that runs, by what the status wants."""
    roles = world.status(namespace, job)["roles"]
    wanted = {role: said["wanted"] for role, said in roles.items() if role != names.PREPARE}
    return {names.pod_name(job, role, worker) for role, count in wanted.items() for worker in range(count)}


def replica_pod(world: World, name: str) -> None:
    """Of the Deployment, so that its label can be seen."""
    container = {"name": "operator", "image": "rlhfspec:slim"}
    spec = {"containers": [container], "serviceAccountName": names.SERVICE_ACCOUNT}
    world.core.create_namespaced_pod(RELEASE_NAMESPACE, {"metadata": {"name": name}, "spec": spec})


def token_of(world: World, namespace: str, pod: str, audience: str = names.AUDIENCE) -> str:
    """As the kubelet projects it."""
    uid = world.core.read_namespaced_pod(pod, namespace).metadata.uid
    bound = {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}
    asked = {"spec": {"audiences": [audience], "expirationSeconds": 600, "boundObjectRef": bound}}
    made = world.core.create_namespaced_service_account_token(names.SERVICE_ACCOUNT, namespace, asked)
    return str(made.status.token)


def writes_of(kubernetes: ControlPlane, operator: Operator, since: datetime) -> list[tuple[str, str, str]]:
    """Namespace, name, and what was done: all that this process wrote but its Lease, from the audit log."""
    return [
        (what.get("namespace", ""), what.get("name", ""), f"{entry['verb']} {resource_of(what)}")
        for entry in kubernetes.audit()
        if entry["userAgent"].startswith(f"{names.FIELD_MANAGER}/{operator.pod}_")
        and entry["verb"] in ("create", "update", "patch", "delete")
        and (what := entry["objectRef"])["resource"] not in ("leases", "tokenreviews")
        and datetime.fromisoformat(entry["requestReceivedTimestamp"]) > since
    ]


def grant(kubernetes: ControlPlane, namespaces: tuple[str, ...], *, kueue: bool = False) -> Path:
    """A user with the operator's rights and no other: its kubeconfig."""
    queues = tuple(rule for rule in rbac.GANG if kueue and rule.group == "kueue.x-k8s.io")
    subject = [{"kind": "User", "name": USER, "apiGroup": "rbac.authorization.k8s.io"}]
    version, api = "rbac.authorization.k8s.io/v1", "rbac.authorization.k8s.io"

    def bound(kind: str, name: str, rules: tuple[rbac.PolicyRule, ...], namespace: str | None) -> list[dict[str, Any]]:
        place = {"namespace": namespace} if namespace else {}
        role = {"apiVersion": version, "kind": kind, "metadata": {"name": name} | place, "rules": rbac.as_rules(rules)}
        reference = {"kind": kind, "name": name, "apiGroup": api}
        binding = {"kind": f"{kind}Binding", "metadata": {"name": name} | place, "roleRef": reference}
        return [role, {"apiVersion": version, **binding, "subjects": subject}]

    things = bound("ClusterRole", "operator-cluster", rbac.CLUSTER + (rbac.KUEUE if kueue else ()), None)
    things += bound("Role", "operator-release", rbac.RELEASE, RELEASE_NAMESPACE)
    for namespace in namespaces:
        things += bound("Role", "operator-jobs", rbac.JOBS + queues, namespace)
    kubernetes.apply(*things)
    return kubernetes.kubeconfig_of(USER)


def define(kubernetes: ControlPlane) -> None:
    """RLHFJobs, until they are served."""
    kubernetes.apply(custom_resource_definition())
    jobs = client.CustomObjectsApi(kubernetes.client())

    def served() -> bool:
        try:
            jobs.list_cluster_custom_object(names.GROUP, names.VERSION, names.PLURAL)
            return True
        except client.ApiException:
            return False

    until(served, "RLHFJobs are served")

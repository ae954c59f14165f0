"""A cluster with the chart installed, and jobs in it: what the tests of whole jobs share."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from cluster import Cluster, ControlPlane

from rlhfspec.messages.records.metrics import curve

ROOT = Path(__file__).parent.parent
CHART = ROOT / "charts" / "rlhfspec"
NAMESPACE, RELEASE = "rlhf", "rlhfspec"
IMAGES_OF_NOBODY = ("--set", "images.registry=registry.example/ml")  # where no node runs them
IMAGES = ("slim", "cpu", "nats", "redis")
# The laptop's sums and a pod's are the same bits when both compute with as many threads.
ONE_THREAD = {"spec": {"containers": [{"name": "worker", "env": [{"name": "OMP_NUM_THREADS", "value": "1"}]}]}}
_NOT_OF_TESTS = shutil.ignore_patterns("smollm2-*", "wide-*", "library-*", "target-*")  # hundreds of megabytes
COMPUTING = ("prepare", "generator", "reward", "reference", "critic", "trainer")
VALUES: dict[str, Any] = {
    "images": {
        "registry": "localhost",
        "serverRegistry": "localhost",
        "slim": {"repository": "rlhfspec", "tag": "slim"},
        "cpu": {"repository": "rlhfspec", "tag": "cpu"},
        "nats": {"repository": "nats", "tag": "2.12"},
        "redis": {"repository": "redis", "tag": "7"},
        "pullPolicy": "Never",
    },
    # Two cores run two nodes here: what is asked for must not keep a pod from being scheduled.
    "operator": {
        "jobNamespaces": [NAMESPACE],
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
    },
    "nats": {"resources": {"requests": {"cpu": "10m"}}},
    "redis": {"resources": {"requests": {"cpu": "10m"}}},
    "dashboard": {"resources": {"requests": {"cpu": "10m"}}},
    "jobs": {
        "resources": {
            role: {"requests": {"cpu": "10m", "memory": "64Mi"}}
            for role in (*COMPUTING, "control", "prompts", "rebalancer", "gateway")
        }
    },
    "storage": {"claim": "jobs"},
}


class Installed:
    """The chart in one namespace, admitted as *restricted*. `storage`: this machine's side of the jobs' claim, which
    has the models and data that this machine has made."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}})
        self.storage = cluster.volume("jobs", NAMESPACE)
        cluster.volume(f"data-{RELEASE}-nats-0", NAMESPACE)  # the claim of its StatefulSet
        copy_made(self.storage / "cache")
        for path in (self.storage, *self.storage.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)

    def install(self, **values: Any) -> str:
        """Or upgrade."""
        file = self.cluster.folder / "values.yaml"
        host, port = self.cluster.address, int(self.cluster.server.rpartition(":")[2])
        api_server = {"networkPolicy": {"apiServer": [{"cidr": f"{host}/32", "except": [], "ports": [port]}]}}
        file.write_text(yaml.safe_dump(merged(merged(VALUES, api_server), values)))
        return self.cluster.helm(
            "upgrade", "--install", RELEASE, str(CHART), "--namespace", NAMESPACE, "--values", str(file),
            "--wait", "--timeout", "240s",
        )  # fmt: skip

    def uninstall(self) -> None:
        self.cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait")

    def rlhf(self, *arguments: str) -> str:
        """What kubectl-rlhf printed, in lines as long as they come; it must not fail."""
        command = [sys.executable, "-m", "rlhfspec.plugin.main", *arguments, "-n", NAMESPACE]
        environment = os.environ | {"KUBECONFIG": str(self.cluster.kubeconfig), "COLUMNS": "500"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, job: dict[str, Any]) -> Job:
        self.cluster.apply(merged(job, {"metadata": {"namespace": NAMESPACE}}))
        return Job(self, job["metadata"]["name"])


class Job:
    def __init__(self, installed: Installed, name: str) -> None:
        self.installed, self.name = installed, name
        self.kubectl = installed.cluster.kubectl

    def get(self) -> dict[str, Any]:
        found: dict[str, Any] = self.installed.cluster.get("rlhfjob", self.name, "-n", NAMESPACE)
        return found

    @property
    def status(self) -> dict[str, Any]:
        return self.get().get("status", {})

    @property
    def phase(self) -> str:
        return str(self.status.get("phase", ""))

    @property
    def step(self) -> int:
        return int(self.status.get("progress", {}).get("step", 0))

    def pods(self, role: str | None = None) -> list[dict[str, Any]]:
        selector = f"rlhfspec.io/job={self.name}" + (f",rlhfspec.io/role={role}" if role else "")
        found: list[dict[str, Any]] = self.installed.cluster.get("pods", "-n", NAMESPACE, "-l", selector)["items"]
        return found

    def reason(self, kind: str = "Healthy") -> str:
        """Of a condition that is not as it should be; empty: it is."""
        for condition in self.status.get("conditions", []):
            if condition["type"] == kind and condition["status"] == "False":
                return str(condition["reason"])
        return ""

    def patch(self, **spec: Any) -> None:
        self.kubectl("patch", "rlhfjob", self.name, "-n", NAMESPACE, "--type=merge", "-p", json.dumps({"spec": spec}))

    def delete(self) -> None:
        self.kubectl("delete", "rlhfjob", self.name, "-n", NAMESPACE, "--timeout=180s")

    def wait(self, what: str, is_so: Callable[[], bool], *, seconds: float) -> float:
        """How long it took; with what was the matter where it did not come."""
        began = time.monotonic()
        while not is_so():
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"{self.name}: not within {seconds:g} s: {what}\n{self.evidence()}")
            time.sleep(0.25)
        return time.monotonic() - began

    def wait_for_phase(self, *phases: str, seconds: float) -> str:
        ended = {"Succeeded", "Failed"} - set(phases)

        def there() -> bool:
            phase = self.phase
            assert phase not in ended, f"{self.name} is {phase}\n{self.evidence()}"
            return phase in phases

        self.wait(f"phase {' or '.join(phases)}", there, seconds=seconds)
        return self.phase

    def wait_for_step(self, step: int, *, seconds: float) -> None:
        self.wait(f"step {step}", lambda: self.step >= step, seconds=seconds)

    @property
    def folder(self) -> Path:
        """This machine's side of the run folder."""
        return self.installed.storage / Path(self.status["run"]["folder"]).relative_to("/storage")

    def curve(self) -> list[dict[str, Any]]:
        return curve_of(self.folder)

    def evidence(self) -> str:
        """What a person would look at."""
        run = self.installed.cluster.kubectl
        parts = [
            json.dumps(self.status, indent=1),
            run("get", "pods", "-n", NAMESPACE, "-o", "wide", check=False),
            run("get", "events", "-n", NAMESPACE, "--sort-by=.lastTimestamp", check=False)[-4000:],
        ]
        for pod in self.pods():
            name = pod["metadata"]["name"]
            parts.append(f"--- {name}\n" + run("logs", "-n", NAMESPACE, name, "--tail=5", check=False)[-2000:])
        return "\n".join(parts)


def kubeconfig_of_account(kubernetes: ControlPlane, namespace: str, account: str) -> Path:
    token = kubernetes.kubectl("create", "token", account, "-n", namespace).strip()
    config = yaml.safe_load(kubernetes.kubeconfig.read_text())
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    path = kubernetes.folder / f"{namespace}-{account}.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def copy_made(folder: Path) -> None:
    """Models and data of the tests' jobs that this machine has made, so that no pod has to."""
    cache = Path(os.environ.get("RLHFSPEC_CACHE", "~/.cache/rlhfspec")).expanduser()
    for part in ("models", "data"):
        if (cache / part).exists():
            shutil.copytree(cache / part, folder / part, ignore=_NOT_OF_TESTS, dirs_exist_ok=True)


def example(name: str, **spec: Any) -> dict[str, Any]:
    """A shipped job, with what a test changes of it, and one thread wherever there is arithmetic."""
    job = yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text())
    roles = {role: {"podTemplate": ONE_THREAD} for role in COMPUTING}
    return merged(merged(job, {"spec": {"roles": roles}}), {"spec": spec})


def on_the_laptop(job: dict[str, Any], folder: Path, *options: str) -> Path:
    """The same job in one process of this machine, or with `--processes` in several: its run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    file, out = folder / "job.yaml", folder / "run"
    file.write_text(yaml.safe_dump(job))
    subprocess.run(
        [sys.executable, "-m", "rlhfspec.cli.start", "run", str(file), "--out", str(out), *options],
        check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return out


def curve_of(folder: Path) -> list[dict[str, Any]]:
    return [curve(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def merged(base: Any, change: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(change, dict)):
        return change
    return base | {key: merged(base[key], value) if key in base else value for key, value in change.items()}

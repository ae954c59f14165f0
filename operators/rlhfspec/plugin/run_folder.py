"""`kubectl rlhf get-run`: copy a run folder from a pod of the job or a helper pod."""

from __future__ import annotations

import secrets
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rlhfspec.cluster import names
from rlhfspec.cluster.names import STORAGE
from rlhfspec.errors import ClusterUnavailable, InvalidRequest
from rlhfspec.plugin.pods import is_running, name_of, state_of

if TYPE_CHECKING:
    from rlhfspec.plugin.cluster import Cluster

Json = dict[str, Any]
HELPER_SECONDS = 3600  # lifetime if nothing removes it
_HELPER_START_SECONDS = 120.0
_USER = 65532  # as the job's pods


def fetch(cluster: Cluster, job: str, folder: Path, *, claim: str | None, image: str | None) -> int:
    """Copy the run folder into an empty folder and return the number of files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidRequest("DIR", str(folder), "already exists and is not an empty folder")
    found = cluster.job(job)
    remote = ((found.get("status") or {}).get("run") or {}).get("folder")
    if not remote:
        raise InvalidRequest("JOB", job, "it has not started: there is no run folder yet")
    pods = cluster.pods(job)
    storage = found["spec"].get("storage") or {}
    uri = storage.get("uri")
    running = None if uri else next((pod for pod in pods if is_running(pod) and _claim_of(pod)), None)
    if running is not None:
        return _copy(cluster, name_of(running), remote, folder)
    claim = None if uri else claim or storage.get("claim") or _first(_claim_of, pods)
    if not uri and not claim:
        raise InvalidRequest("--claim", None, "must name the claim of the run folder, as no pod of the job is left")
    with _helper(cluster, found, pods, claim, image) as pod:
        if uri:
            _fetch(cluster, pod, uri, remote)
        return _copy(cluster, pod, remote, folder)


def _fetch(cluster: Cluster, pod: str, uri: str, remote: str) -> None:
    """Download the run folder into the helper pod, which has the credentials."""
    program = ["python", "-m", "rlhfspec.common.object_store", uri, str(STORAGE), remote]
    done = subprocess.run(cluster.exec(pod, *program), capture_output=True, text=True)
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line]
        raise ClusterUnavailable(f"{remote} of {uri}", next(iter(said), "no data received"))


def _copy(cluster: Cluster, pod: str, remote: str, folder: Path) -> int:
    command = cluster.exec(pod, "tar", "-C", remote, "-cf", "-", ".")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as copying:
        assert copying.stdout is not None
        assert copying.stderr is not None
        try:
            num_files = _unpack(copying.stdout, folder)
        except tarfile.TarError:
            num_files = 0  # kubectl prints the reason
        said = [line for line in copying.stderr.read().decode(errors="replace").splitlines() if line]
    # tar ends with 1 when a file changed while it was read, as in a running job.
    has_failed = copying.returncode > 1 or (copying.returncode and not any("file changed" in line for line in said))
    if has_failed or not num_files:
        raise ClusterUnavailable(f"{remote} of {pod}", next(iter(said), "no data received"))
    return num_files


def _unpack(stream: IO[bytes], folder: Path) -> int:
    num_files = 0
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        folder.mkdir(parents=True, exist_ok=True)
        for member in archive:
            archive.extract(member, folder, filter="data")
            num_files += member.isfile()
    return num_files


@contextmanager
def _helper(cluster: Cluster, job: Json, pods: list[Json], claim: str | None, image: str | None) -> Iterator[str]:
    image = image or _first(_image_of, pods)
    if not image:
        raise InvalidRequest("--image", None, "must name an image with tar, as no pod of the job is left")
    name = f"{name_of(job)}-get-run-{secrets.token_hex(2)}"
    secret = (job["spec"].get("storage") or {}).get("secret")
    cluster.create_pod(helper_pod(name, cluster.namespace, claim, image, secret=secret))
    try:
        _wait_until_running(cluster, name)
        yield name
    finally:
        cluster.delete_pod(name)


def helper_pod(name: str, namespace: str, claim: str | None, image: str, *, secret: str | None = None) -> Json:
    """Return a helper pod that reads the claim, or an object store with the credentials in `secret`."""
    volume = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": "kubectl-rlhf"},
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": HELPER_SECONDS,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER,
                "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": names.CONTAINER,
                    "image": image,
                    "command": ["sleep", str(HELPER_SECONDS)],
                    "envFrom": [{"secretRef": {"name": secret}}] if secret else [],
                    "resources": {
                        "requests": {"cpu": "50m", "memory": "32Mi"}, "limits": {"memory": "64Mi" if claim else "2Gi"},
                    },
                    "volumeMounts": [{"name": "storage", "mountPath": str(STORAGE), "readOnly": claim is not None}],
                    "securityContext": {
                        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
            "volumes": [{"name": "storage", **volume}],
        },
    }  # fmt: skip


def _wait_until_running(cluster: Cluster, name: str) -> None:
    began = time.monotonic()
    while True:
        pod = cluster.pod(name)
        if pod is not None and is_running(pod):
            return
        state = state_of(pod) if pod is not None else None
        if time.monotonic() - began > _HELPER_START_SECONDS:
            why = f"{state.word} {state.detail}" if state else "the pod is gone"
            raise ClusterUnavailable(f"a start of {name}", f"not running after {_HELPER_START_SECONDS:g} s: {why}")
        time.sleep(0.5)


def _first(of: Callable[[Json], str | None], pods: list[Json]) -> str | None:
    return next((found for found in map(of, pods) if found), None)


def _claim_of(pod: Json) -> str | None:
    volumes = pod["spec"].get("volumes") or ()
    return next(
        (each["persistentVolumeClaim"]["claimName"] for each in volumes if "persistentVolumeClaim" in each), None
    )


def _image_of(pod: Json) -> str | None:
    containers = pod["spec"]["containers"]
    return next((each["image"] for each in containers if each["name"] == names.CONTAINER), None)

"""Questions to the job's control, asked where the run's credentials and folder are: in its pod."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

from rlhfspec.cluster import names
from rlhfspec.cluster.names import CONTROL
from rlhfspec.errors import ClusterUnavailable, InvalidRequest
from rlhfspec.plugin.pods import is_running, name_of

if TYPE_CHECKING:
    from rlhfspec.plugin.cluster import Cluster

EXEC_SECONDS = 60.0
_SHOW = ("python", "-m", "rlhfspec.control.show")


def view_command(cluster: Cluster, job: str) -> list[str]:
    return cluster.kubectl("exec", "-it", _pod(cluster, job), "-c", names.CONTAINER, "--", *_SHOW, "--view")


def asked(cluster: Cluster, job: str, *options: str) -> Any:
    """What `rlhfspec.control.show` prints, as JSON."""
    command = cluster.kubectl("exec", _pod(cluster, job), "-c", names.CONTAINER, "--", *_SHOW, *options)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=EXEC_SECONDS)
    except subprocess.TimeoutExpired:
        raise ClusterUnavailable(f"a look at {job}", f"no answer within {EXEC_SECONDS:g} s") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line and "command terminated" not in line]
        raise ClusterUnavailable(f"a look at {job}", said[-1] if said else f"exit code {done.returncode}")
    return json.loads(done.stdout)


def _pod(cluster: Cluster, job: str) -> str:
    phase = (cluster.job(job).get("status") or {}).get("phase", "Pending")
    for pod in cluster.pods(job, CONTROL):
        if is_running(pod):
            return name_of(pod)
    raise InvalidRequest("JOB", job, f"its control does not run: the job is {phase}")

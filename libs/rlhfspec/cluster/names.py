"""Names of a job's objects in a cluster.

A role is a stage, `prepare` (checks the job, makes the run folder) or `control` (opens the run and reports on it).

Example:
    >>> pod_name("sums", "generator", 2), secret_name("sums", "generator", "6f1c-42"), run_uid("6f1c-42", 1)
    ('sums-generator-2', 'sums-generator-6f1c-42', 'c0e43711065c73ab')
    >>> labels_of("sums", "generator", 2)["rlhfspec.io/role"]
    'generator'
"""

from __future__ import annotations

import hashlib
from pathlib import PurePosixPath

from rlhfspec.messages.loop import GATEWAY, SUPERVISED

GROUP, VERSION, PLURAL, KIND = "rlhfspec.io", "v1alpha1", "rlhfjobs", "RLHFJob"
PREPARE, CONTROL = "prepare", "control"
ROLES = (PREPARE, CONTROL, *(stage.name for stage in SUPERVISED))
# Stages that import torch and need the large image.
TORCH_ROLES = (PREPARE, "generator", "reward", "reference", "critic", "trainer")

FIELD_MANAGER = "rlhfspec-operator"
MANAGED_BY = "app.kubernetes.io/managed-by"
NAME = "app.kubernetes.io/name"
COMPONENT = "app.kubernetes.io/component"  # of the release's own pods: operator, nats, redis, dashboard
JOB, ROLE, WORKER, RUN = f"{GROUP}/job", f"{GROUP}/role", f"{GROUP}/worker", f"{GROUP}/run"
RESTART_ID = f"{GROUP}/restart-id"  # annotation of a pod: the restart.id it was started under
PROOF = f"{GROUP}/proof"  # annotation of a pod: only the operator can compute it
URL = f"{GROUP}/url"  # annotation of a gateway's pod: where clients reach it
LEADER = f"{GROUP}/leader"  # label of the leading operator pod; the Service selects it

CONTAINER = "worker"  # container of a job's pod that runs the stage
SERVICE_ACCOUNT = "rlhfspec-job"  # of every pod of a job; only control's pod gets a token of it
AUDIENCE = "rlhfspec-operator"  # audience of that token
CONFIG = PurePosixPath("/etc/rlhfspec")  # the job's ConfigMap: connections.json and job.json, as the API server has it
CONNECTIONS_FILE, JOB_FILE = CONFIG / "connections.json", CONFIG / "job.json"
CREDENTIALS = PurePosixPath("/etc/rlhfspec-credentials")  # the role's Secret
TOKEN_FILE = PurePosixPath("/var/run/secrets/rlhfspec/token")  # token of the control pod
STORAGE = PurePosixPath("/storage")  # the job's claim: data, models, run folders; relative paths of a job begin here
CACHE = STORAGE / "cache"  # models and data that are made or downloaded once
HTTP_PORT, GRPC_PORT, MOVES_PORT, LINK_PORT = 8080, 50051, 50052, 50053  # of every worker's pod
SERVE_PORT = 8000  # of the gateway's pod and Service: for clients
CLIENTS, TOKEN_KEY = "clients", "token"  # of the gateway: the Secret NAME-clients-UID has their token at this key
RANKS_PORT = 29500  # of the trainer's first pod: where ranks of several nodes meet; gloo and NCCL take any above it
REPORT_PORT = 8443  # of the operator's Service
NATS_PORT, REDIS_PORT, DASHBOARD_PORT = 4222, 6379, 8000
# Host name in every worker's certificate, because pod addresses are not known beforehand.
WORKER_HOST = "worker.rlhfspec.internal"


def pod_name(job: str, role: str, worker: int) -> str:
    return f"{job}-{role}-{worker}"


def config_name(job: str, job_uid: str) -> str:
    """Return the name of the job's ConfigMap, unique by part of the job's uid."""
    return f"{job}-connections-{job_uid[:8]}"


def secret_name(job: str, role: str, job_uid: str) -> str:
    """Return the name of a role's Secret."""
    return f"{job}-{role}-{job_uid[:8]}"


def ranks_name(job: str, job_uid: str) -> str:
    """Return the name of the headless Service of trainer ranks, which must begin with a letter.

    >>> ranks_name("1" * 52, "6f1c-42")
    'ranks-1111111111111111111111111111111111111111-6f1c-42'
    """
    return policy_name("ranks", job, job_uid)


def policy_name(ports: str, job: str, job_uid: str) -> str:
    """Return the name of a job's NetworkPolicy for ports such as moves."""
    return f"{ports}-{job[:40].rstrip('-')}-{job_uid[:8]}"


def gateway_name(job: str, job_uid: str) -> str:
    """Return the name of the gateway's Service, which must begin with a letter."""
    return policy_name(GATEWAY.name, job, job_uid)


def workload_name(job: str, job_uid: str) -> str:
    return f"rlhfjob-{job}-{job_uid[:8]}"


def labels_of(job: str, role: str, worker: int) -> dict[str, str]:
    return {NAME: "rlhfspec", MANAGED_BY: FIELD_MANAGER, JOB: job, ROLE: role, WORKER: str(worker)}


def run_uid(job_uid: str, number: int) -> str:
    """Return the uid of the job's n-th run, a hash too long for forged numbers to match another run."""
    return hashlib.sha256(f"{job_uid}/{number}".encode()).hexdigest()[:16]


def run_folder(job: str, job_uid: str) -> PurePosixPath:
    """Return the default run folder, unique by part of the job's uid."""
    return STORAGE / "runs" / f"{job}-{job_uid[:8]}"


def report_path(namespace: str, job: str) -> str:
    """Return the URL path to which control POSTs a `Report`."""
    return f"/v1/namespaces/{namespace}/jobs/{job}/report"

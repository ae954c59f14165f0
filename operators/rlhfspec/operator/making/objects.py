"""What a job is made of beside its pods: a ConfigMap that says how the pods reach each other, a Secret for each role,
and what a gang scheduler wants. All names are functions of the job's, all contents of the job and its run."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from typing import Any

from rlhfspec.cluster import names
from rlhfspec.operator.deciding.draft import Draft
from rlhfspec.operator.deciding.observed import Worker
from rlhfspec.operator.making import gang, network, pods


def objects_for(draft: Draft, workers: Sequence[Worker]) -> list[dict[str, Any]]:
    """The pods of these workers, after what they mount."""
    if not workers:
        return []
    roles = dict.fromkeys(role for role, _ in workers)
    group = [] if set(roles) <= {names.PREPARE} else gang.pod_group(draft, metadata(draft))
    return [
        config_map(draft),
        *(secret(draft, role) for role in roles),
        *group,
        *network.policies(draft, metadata(draft)),
        *([ranks_service(draft)] if "trainer" in roles and draft.spec.roles.trainer.nodes > 1 else []),
        *(pod(draft, key) for key in workers),
    ]


def mounted_by(draft: Draft, roles: Iterable[str]) -> list[dict[str, Any]]:
    """Only what pods of these roles mount: somebody removed it."""
    return [config_map(draft), *(secret(draft, role) for role in roles)]


def pod(draft: Draft, key: Worker) -> dict[str, Any]:
    return pods.pod(draft, key, _owner(draft))


def connections(draft: Draft) -> dict[str, Any]:
    """A `service.connections.Connections`, as JSON."""
    job, settings, folder = draft.job, draft.settings, run_folder(draft)
    told: dict[str, Any] = {
        "uid": draft.run_uid,
        "job_file": f"{folder}/processes/job.json",
        "base_folder": str(names.STORAGE),
        "folder": folder,
        "nats_url": settings.nats_url,
        "redis_url": settings.redis_url,
        "credentials": str(names.CREDENTIALS),
        "weights": "grpc",
        "folder_is_kept_by": "trainer",
        "otlp_endpoint": draft.spec.observability.otlp_endpoint or settings.otlp_endpoint,
        "http_port": names.HTTP_PORT,
        "grpc_port": names.GRPC_PORT,
        "moves_port": names.MOVES_PORT,
        "link_port": names.LINK_PORT,
        "worker_host": names.WORKER_HOST,
        "report_url": settings.report_url + names.report_path(job.namespace, job.name),
    }
    if draft.spec.storage.uri is not None:
        told["storage_uri"] = draft.spec.storage.uri
    return told


def run_folder(draft: Draft) -> str:
    written = draft.spec.storage.run_folder
    return str(names.STORAGE / written if written else names.run_folder(draft.job.name, draft.job.uid))


def config_map(draft: Draft) -> dict[str, Any]:
    data = {names.CONNECTIONS_FILE.name: connections(draft), names.JOB_FILE.name: draft.job.manifest}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(draft) | {"name": names.config_name(draft.job.name, draft.job.uid)},
        "data": {name: json.dumps(value, indent=2, sort_keys=True) for name, value in data.items()},
    }


def ranks_service(draft: Draft) -> dict[str, Any]:
    """A name for each of the trainer's pods, also before it is ready: ranks meet before that."""
    job = draft.job
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(draft) | {"name": names.ranks_name(job.name, job.uid)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.JOB: job.name, names.ROLE: "trainer"},
            "ports": [{"name": "ranks", "port": names.RANKS_PORT, "protocol": "TCP"}],
        },
    }


def secret(draft: Draft, role: str) -> dict[str, Any]:
    job = draft.job
    data = draft.settings.credentials(job.namespace, job.name, job.uid, draft.run_uid, role, job.created)
    own = metadata(draft) | {"name": names.secret_name(job.name, role, job.uid)}
    own["labels"] = own["labels"] | {names.ROLE: role}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": own,
        "data": {name: base64.b64encode(value).decode() for name, value in sorted(data.items())},
    }


def metadata(draft: Draft) -> dict[str, Any]:
    job = draft.job
    labels = {names.NAME: "rlhfspec", names.MANAGED_BY: names.FIELD_MANAGER, names.JOB: job.name}
    return {"namespace": job.namespace, "labels": labels, "ownerReferences": [_owner(draft)]}


def _owner(draft: Draft) -> dict[str, Any]:
    """With it the API server removes what a job leaves behind."""
    return {
        "apiVersion": f"{names.GROUP}/{names.VERSION}",
        "kind": names.KIND,
        "name": draft.job.name,
        "uid": draft.job.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }

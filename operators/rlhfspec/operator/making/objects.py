"""Objects of a job other than its pods: ConfigMap, Secrets, Service and PodGroup."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlhfspec.cluster import names
from rlhfspec.messages.access.connections import CLIENT_TOKEN
from rlhfspec.messages.loop import GATEWAY
from rlhfspec.operator.deciding.observed import Worker
from rlhfspec.operator.deciding.situation import Situation
from rlhfspec.operator.making import network, pods

_POD_GROUPS = {"volcano": "scheduling.volcano.sh/v1beta1", "coscheduling": "scheduling.x-k8s.io/v1alpha1"}


def objects_for(known: Situation, workers: Sequence[Worker]) -> list[dict[str, Any]]:
    """Return the pods of these workers, preceded by the objects that they mount."""
    if not workers:
        return []
    roles = dict.fromkeys(role for role, _ in workers)
    group = [] if set(roles) <= {names.PREPARE} else _pod_group(known)
    return [
        config_map(known),
        *_secrets(known, [role for role in roles if role != GATEWAY.name]),
        *group,
        *network.policies(known, metadata(known)),
        *([ranks_service(known)] if "trainer" in roles and known.spec.roles.trainer.nodes > 1 else []),
        *(pod(known, key) for key in workers if key[0] != GATEWAY.name),
        *(_gateway(known) if GATEWAY.name in roles else []),  # a refusal among these stops no other pod
    ]


def mounted_by(known: Situation, roles: Iterable[str]) -> list[dict[str, Any]]:
    return [config_map(known), *_secrets(known, roles)]


def pod(known: Situation, key: Worker) -> dict[str, Any]:
    return pods.pod(known, key, _owner(known))


def connections(known: Situation) -> dict[str, Any]:
    """Return the contents of `connections.json`: URLs, folders, ports."""
    job, settings, folder = known.job, known.settings, str(known.run_folder)
    told: dict[str, Any] = {
        "uid": known.run_uid,
        "job_file": f"{folder}/processes/job.json",
        "base_folder": str(names.STORAGE),
        "folder": folder,
        "nats_url": settings.nats_url,
        "redis_url": settings.redis_url,
        "credentials": str(names.CREDENTIALS),
        "weights": "grpc",
        "folder_is_kept_by": "trainer",
        "otlp_endpoint": known.spec.observability.otlp_endpoint or settings.otlp_endpoint,
        "http_port": names.HTTP_PORT,
        "grpc_port": names.GRPC_PORT,
        "moves_port": names.MOVES_PORT,
        "link_port": names.LINK_PORT,
        "worker_host": names.WORKER_HOST,
        "report_url": settings.report_url + names.report_path(job.namespace, job.name),
    }
    if known.spec.roles.gateway.workers:
        told["serve_port"] = names.SERVE_PORT
    if known.spec.storage.uri is not None:
        told["storage_uri"] = known.spec.storage.uri
    return told


def config_map(known: Situation) -> dict[str, Any]:
    data = {names.CONNECTIONS_FILE.name: connections(known), names.JOB_FILE.name: known.job.manifest}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(known) | {"name": names.config_name(known.job.name, known.job.uid)},
        "data": {name: json.dumps(value, indent=2, sort_keys=True) for name, value in data.items()},
    }


def ranks_service(known: Situation) -> dict[str, Any]:
    """Return the trainer's headless Service, with unready pods because ranks connect before they are ready."""
    job = known.job
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(known) | {"name": names.ranks_name(job.name, job.uid)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.JOB: job.name, names.ROLE: "trainer"},
            "ports": [{"name": "ranks", "port": names.RANKS_PORT, "protocol": "TCP"}],
        },
    }


def _gateway(known: Situation) -> list[dict[str, Any]]:
    """Return the gateway's Secrets, Service, Ingress and pod."""
    job, port = known.job, "serve"
    name = names.gateway_name(job.name, job.uid)
    service: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(known) | {"name": name},
        "spec": {
            "selector": {names.JOB: job.name, names.ROLE: GATEWAY.name},
            "ports": [{"name": port, "port": names.SERVE_PORT, "protocol": "TCP"}],
        },
    }
    made, url = [service], f"http://{name}.{job.namespace}.svc:{names.SERVE_PORT}/v1"
    if (outside := known.settings.gateway_ingress) is not None:
        backend = {"service": {"name": name, "port": {"name": port}}}
        host = outside.host_of(job.name, job.uid)
        url = f"https://{host}/v1"
        spec: dict[str, Any] = {
            "tls": [{"hosts": [host], **({"secretName": outside.tls_secret} if outside.tls_secret else {})}],
            "rules": [{"host": host, "http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]}}],
        }
        if outside.class_name:
            spec["ingressClassName"] = outside.class_name
        own = metadata(known) | {"name": name, "annotations": outside.annotations}
        made.append({"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "metadata": own, "spec": spec})
    answering = pod(known, (GATEWAY.name, 0))
    answering["metadata"]["annotations"][names.URL] = url  # it exists when the pod does
    return [*_secrets(known, [GATEWAY.name]), *made, answering]


def _pod_group(known: Situation) -> list[dict[str, Any]]:
    scheduling = known.spec.scheduling
    if scheduling.gang not in _POD_GROUPS:
        return []
    spec: dict[str, Any] = {"minMember": sum(pods.group_counts(known).values())}
    if scheduling.gang == "volcano":
        spec |= {"queue": scheduling.queue} if scheduling.queue else {}
        spec |= {"priorityClassName": scheduling.priority_class} if scheduling.priority_class else {}
    else:
        spec["scheduleTimeoutSeconds"] = 60
    return [
        {
            "apiVersion": _POD_GROUPS[scheduling.gang],
            "kind": "PodGroup",
            "metadata": metadata(known) | {"name": pods.group_name(known)},
            "spec": spec,
        }
    ]


def _secrets(known: Situation, roles: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the Secrets of roles, and that of the gateway's clients unless the job names one."""
    for role in roles:
        data = _credentials(known, role)
        yield _secret(known, role, data)
        if role == GATEWAY.name and known.spec.roles.gateway.token_secret is None:
            yield _secret(known, names.CLIENTS, {names.TOKEN_KEY: data[CLIENT_TOKEN]})


def _credentials(known: Situation, role: str) -> Mapping[str, bytes]:
    job = known.job
    return known.settings.credentials(job.namespace, job.name, job.uid, known.run_uid, role, job.created)


def _secret(known: Situation, role: str, data: Mapping[str, bytes]) -> dict[str, Any]:
    own = metadata(known) | {"name": names.secret_name(known.job.name, role, known.job.uid)}
    own["labels"] = own["labels"] | {names.ROLE: role}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": own,
        "data": {name: base64.b64encode(value).decode() for name, value in sorted(data.items())},
    }


def metadata(known: Situation) -> dict[str, Any]:
    job = known.job
    labels = {names.NAME: "rlhfspec", names.MANAGED_BY: names.FIELD_MANAGER, names.JOB: job.name}
    return {"namespace": job.namespace, "labels": labels, "ownerReferences": [_owner(known)]}


def _owner(known: Situation) -> dict[str, Any]:
    """Return the owner reference for garbage collection."""
    return {
        "apiVersion": f"{names.GROUP}/{names.VERSION}",
        "kind": names.KIND,
        "name": known.job.name,
        "uid": known.job.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }

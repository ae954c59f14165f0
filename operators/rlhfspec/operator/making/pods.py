"""Pod of one worker, valid under the *restricted* security standard and the same at every restart in a run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any

from rlhfspec.cluster import names
from rlhfspec.common.ranks import SECRET_FILE, set_of_ranks
from rlhfspec.job.block import MOST
from rlhfspec.job.cluster import PodOptions
from rlhfspec.messages.access.connections import CLIENT_TOKEN_VARIABLE
from rlhfspec.messages.loop import BY_NAME, GATEWAY
from rlhfspec.operator.deciding.allowed import CONTAINERS, containers_of
from rlhfspec.operator.deciding.observed import Worker, worker_name
from rlhfspec.operator.deciding.situation import Situation
from rlhfspec.operator.making import storage

_UNPRIVILEGED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_USER = 65532  # of the images; any other works too
SLOW_LEAVERS = ("trainer", "generator")  # the trainer writes a checkpoint, generators hand over
# Kubernetes revisits a deleted namespace after half of the longest grace period of its pods, so these are short.
# A trainer that must resume from its checkpoint gets CHECKPOINT_SECONDS instead.
_GRACE_SECONDS, LONG_GRACE_SECONDS = 30, 60
CHECKPOINT_SECONDS = 600
NODE_SECONDS = 60  # before pods of an unreachable node are evicted
TOKEN_SECONDS = 3600
LOAD_SECONDS = 600  # startup limit: imports, and a slow file system
_DOWNLOAD_SECONDS = 4 * 3600  # with downloads from an object store


def pod(known: Situation, key: Worker, owner: dict[str, Any]) -> dict[str, Any]:
    role, worker = key
    options: PodOptions = getattr(known.spec.roles, role)
    metadata = {
        "name": names.pod_name(known.job.name, role, worker),
        "namespace": known.job.namespace,
        "labels": names.labels_of(known.job.name, role, worker) | {names.RUN: known.run_uid},
        "annotations": {names.RESTART_ID: _restart_id(known, role), names.PROOF: known.proof_of(worker_name(key))},
        "ownerReferences": [owner],
    }
    whole: dict[str, Any] = {
        "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": _spec(known, key, options),
    }  # fmt: skip
    ours, jobs, roles = _templates(known, options)
    for change in (ours, _of_scheduler(known, key), jobs, roles):
        whole = merged(whole, change)
    for name in ("labels", "annotations"):  # the operator finds pods by these
        whole["metadata"][name] = whole["metadata"][name] | metadata[name]
    whole["metadata"] |= {"name": metadata["name"], "namespace": metadata["namespace"], "ownerReferences": [owner]}
    whole["spec"]["restartPolicy"] = "Never"
    _take_privileges(whole["spec"], ours)
    storage.protect_claims(known, role, whole["spec"], ours)
    return whole


def _take_privileges(spec: dict[str, Any], cluster: Mapping[Any, Any]) -> None:
    """Drop the privileges of containers that the job adds to those of `cluster`, the chart's template."""
    known = {names.CONTAINER} | {each["name"] for each in containers_of(cluster)}
    for kind in CONTAINERS:
        if kind in spec:
            spec[kind] = [
                each
                if each.get("name") in known
                else {**each, "securityContext": merged(_UNPRIVILEGED, each.get("securityContext", {}))}
                for each in spec[kind]
            ]


def _restart_id(known: Situation, role: str) -> str:
    restart = known.spec.restart
    return restart.id if not restart.roles or role in restart.roles else ""


def _templates(known: Situation, options: PodOptions) -> tuple[Mapping[Any, Any], ...]:
    """Return the pod templates in merge order: the chart's, the job's, the role's."""
    return known.settings.pod_template, known.spec.pod_template, options.pod_template


def trainer_seconds(known: Situation) -> int:
    """Return the trainer's grace period in seconds, which templates may raise."""
    templates = _templates(known, known.spec.roles.trainer) if known.job.job else ()
    said = [template.get("spec", {}).get("terminationGracePeriodSeconds") for template in templates]
    return max(CHECKPOINT_SECONDS, *(each for each in said if isinstance(each, int)), 0)


def _spec(known: Situation, key: Worker, options: PodOptions) -> dict[str, Any]:
    role, scheduling = key[0], known.spec.scheduling
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "serviceAccountName": names.SERVICE_ACCOUNT,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": LONG_GRACE_SECONDS if role in SLOW_LEAVERS else _GRACE_SECONDS,
        "securityContext": _security(known),
        "tolerations": [
            {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute",
             "tolerationSeconds": NODE_SECONDS}
            for state in ("not-ready", "unreachable")
        ],
        "containers": [_container(known, key, options)],
        "volumes": _volumes(known, role),
    }  # fmt: skip
    if secrets := known.settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in secrets]
    classes: Mapping[Any, str] = known.settings.priority_classes
    priority_class = scheduling.priority_class or classes.get(role)
    if priority_class:
        spec["priorityClassName"] = priority_class
    if _is_node(known, role):
        spec |= {
            "hostname": names.pod_name(known.job.name, *key),
            "subdomain": names.ranks_name(known.job.name, known.job.uid),
        }
    if scheduling.topology_key and role == "generator":
        spec["topologySpreadConstraints"] = [_spread(known, scheduling.topology_key)]
    return spec


def _security(known: Situation) -> dict[str, Any]:
    user = {"runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER, "fsGroupChangePolicy": "OnRootMismatch"}
    return {
        "runAsNonRoot": True,
        **(user if known.settings.chooses_user else {}),
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _spread(known: Situation, topology_key: str) -> dict[str, Any]:
    return {
        "maxSkew": 1,
        "topologyKey": topology_key,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {names.JOB: known.job.name, names.ROLE: "generator"}},
    }


def _container(known: Situation, key: Worker, options: PodOptions) -> dict[str, Any]:
    role = key[0]
    resources = _asked(known, role, options)
    container: dict[str, Any] = {
        "name": names.CONTAINER,
        "image": image_of(known, role, options),
        "imagePullPolicy": known.settings.image_pull_policy,
        "command": command(known, key),
        "env": [*_environment(known, role), *_threads(resources, _num_processes(known, role))],
        **_variables_of(known.spec.storage.secret),
        "resources": {name: dict(amounts) for name, amounts in resources.items()},
        "volumeMounts": _mounts(known, role),
        "securityContext": {"readOnlyRootFilesystem": True, **_UNPRIVILEGED},
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }  # fmt: skip
    if role != names.PREPARE and not (role == "trainer" and key[1]):  # only node 0 serves
        probes = _probes(role, _DOWNLOAD_SECONDS if known.spec.storage.uri else LOAD_SECONDS)
        container |= {"ports": _ports(role), **probes}
    return container


def image_of(known: Situation, role: str, options: PodOptions) -> str:
    images = known.settings.images
    if options.image is not None:
        return options.image
    if role not in names.TORCH_ROLES:
        return images.slim
    return images.cuda if any(_gpus(known, role, options).values()) else images.cpu


def command(known: Situation, key: Worker) -> list[str]:
    """Return a worker's command line, the same as under the local supervisor."""
    role, worker = key
    module = ["-m", f"rlhfspec.{role}", "--connections", str(names.CONNECTIONS_FILE)]
    ranks = known.spec.roles.trainer.ranks_per_node if role == "trainer" else 1
    if _is_node(known, role):
        first = f"{names.pod_name(known.job.name, role, 0)}.{names.ranks_name(known.job.name, known.job.uid)}"
        place = ["--node", str(worker), "--leader", f"{first}:{names.RANKS_PORT}"]
        place += ["--secret", str(names.CREDENTIALS / SECRET_FILE)]
        return ["python", *set_of_ranks(ranks, nodes=known.spec.roles.trainer.nodes), *place, *module, "--worker", "0"]
    if role in BY_NAME:
        module += ["--worker", str(worker)]
    return ["python", *(set_of_ranks(ranks) if ranks > 1 else []), *module]


def _is_node(known: Situation, role: str) -> bool:
    return role == "trainer" and known.spec.roles.trainer.nodes > 1


def _environment(known: Situation, role: str) -> list[dict[str, Any]]:
    values = storage.variables(known, role) | {
        "RLHFSPEC_RUN": known.run_uid, "HOME": "/tmp", "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # keep them out of the log
    }  # fmt: skip
    if role != "trainer":  # its optimizer may be a module beside the data; no other role imports from the storage
        values["PYTHONSAFEPATH"] = "1"
    host = {"name": "RLHFSPEC_HOST", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}}
    named: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in values.items()]
    if role == GATEWAY.name and (secret := known.spec.roles.gateway.token_secret) is not None:
        token = {"secretKeyRef": {"name": secret, "key": names.TOKEN_KEY}}
        named.append({"name": CLIENT_TOKEN_VARIABLE, "valueFrom": token})
    return [host, *named]


def _threads(resources: Mapping[Any, Any], processes: int) -> list[dict[str, Any]]:
    """Return OMP_NUM_THREADS for the CPU limit, because torch would count the node's cores.

    >>> _threads({"limits": {"cpu": "3500m"}}, 1), _threads({"limits": {"cpu": 8}}, 2), _threads({}, 1)
    ([{'name': 'OMP_NUM_THREADS', 'value': '3'}], [{'name': 'OMP_NUM_THREADS', 'value': '4'}], [])
    """
    cores = amount(resources.get("limits", {}).get("cpu"))
    if not cores:
        return []
    return [{"name": "OMP_NUM_THREADS", "value": str(max(int(cores / processes), 1))}]


def _num_processes(known: Situation, role: str) -> int:
    return known.spec.roles.trainer.ranks_per_node if role == "trainer" else known.spec.num_processes(role)


def _ports(role: str) -> list[dict[str, Any]]:
    ports = {"http": names.HTTP_PORT}
    if role in BY_NAME:
        ports["grpc"] = names.GRPC_PORT
    if role == "generator":
        ports |= {"moves": names.MOVES_PORT, "link": names.LINK_PORT}
    if role == GATEWAY.name:
        ports["serve"] = names.SERVE_PORT
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]


def _variables_of(secret: str | None) -> dict[str, Any]:
    return {} if secret is None else {"envFrom": [{"secretRef": {"name": secret}}]}


def _probes(role: str, start_seconds: int) -> dict[str, Any]:
    """Return probes that restart a process that does not start in `start_seconds` or hangs for a minute.

    A gateway is ready while its clients' port reports that a generator answers.
    """

    def probe(path: str, port: str = "http", **settings: int) -> dict[str, Any]:
        return {"httpGet": {"path": path, "port": port, "scheme": "HTTP"}, **settings}

    ready = ("/healthz", "serve") if role == GATEWAY.name else ("/readyz", "http")

    return {
        "startupProbe": probe("/healthz", periodSeconds=2, timeoutSeconds=5, failureThreshold=start_seconds // 2),
        "livenessProbe": probe("/healthz", periodSeconds=10, timeoutSeconds=5, failureThreshold=6),
        "readinessProbe": probe(*ready, periodSeconds=2, timeoutSeconds=5, failureThreshold=2),
    }


def _volumes(known: Situation, role: str) -> list[dict[str, Any]]:
    job, uid = known.job.name, known.job.uid
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": names.config_name(job, uid), "defaultMode": 0o444}},
        {"name": "credentials", "secret": {"secretName": names.secret_name(job, role, uid), "defaultMode": 0o440}},
        storage.volume(known),
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": known.settings.shared_memory}},
    ]
    if role == names.CONTROL:
        token = {"audience": names.AUDIENCE, "expirationSeconds": TOKEN_SECONDS, "path": names.TOKEN_FILE.name}
        volumes.append(
            {"name": "token", "projected": {"defaultMode": 0o440, "sources": [{"serviceAccountToken": token}]}}
        )
    return volumes


def _mounts(known: Situation, role: str) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": "config", "mountPath": str(names.CONFIG), "readOnly": True},
        {"name": "credentials", "mountPath": str(names.CREDENTIALS), "readOnly": True},
        *storage.mounts(known, role),
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if role == names.CONTROL:
        mounts.append({"name": "token", "mountPath": str(names.TOKEN_FILE.parent), "readOnly": True})
    return mounts


def num_gpus(known: Situation, role: str) -> int:
    options: PodOptions = getattr(known.spec.roles, role)
    return min(sum(_gpus(known, role, options).values()), MOST)  # a quantity like 1e99 does not fit the status


def _gpus(known: Situation, role: str, options: PodOptions) -> dict[str, int]:
    """Return the worker container's GPU limits by resource name, counting each resource claim as one device."""
    resources = _resources(known, role, options)
    limits, claims = resources.get("limits"), resources.get("claims")
    found = {
        name: math.ceil(amount(said))
        for name, said in (limits.items() if isinstance(limits, Mapping) else ())
        if any(fnmatchcase(name, pattern) for pattern in known.settings.gpu_resources)
    }
    return found | ({"claims": len(claims)} if isinstance(claims, list) and claims else {})


def _asked(known: Situation, role: str, options: PodOptions) -> Mapping[Any, Any]:
    """Return the job's resources, with the chart's defaults for those it does not name."""
    named = {name for amounts in options.resources.values() for name in amounts}
    defaults = {
        kind: {name: amount for name, amount in amounts.items() if name not in named}
        for kind, amounts in known.settings.resources.get(role, {}).items()
    }
    return merged(defaults, options.resources)


def _resources(known: Situation, role: str, options: PodOptions) -> Mapping[Any, Any]:
    """Return the worker container's resources after merging templates."""
    resources = _asked(known, role, options)
    for template in _templates(known, options):
        containers = template.get("spec", {}).get("containers")
        for container in containers if isinstance(containers, list) else ():
            own = container.get("resources") if isinstance(container, Mapping) else None
            if isinstance(own, Mapping) and container.get("name") == names.CONTAINER:
                resources = merged(resources, own)
    return resources


def group_name(known: Situation) -> str:
    return f"{known.job.name}-{known.run_uid}"


def group_counts(known: Situation) -> dict[str, int]:
    """Return the number of workers per role that start together; for elastic generators, the minimum."""
    replicas = known.spec.roles.generator.replicas
    together = {role: count for role, count in known.num_workers().items() if role != GATEWAY.name}
    return together | ({"generator": replicas.min} if replicas else {})


def _of_scheduler(known: Situation, key: Worker) -> dict[str, Any]:
    """Return the additions to a pod that its gang scheduler needs."""
    scheduling, (role, worker) = known.spec.scheduling, key
    is_member = role != names.PREPARE and worker < group_counts(known).get(role, 0)
    if scheduling.gang == "kueue":
        place = known.memory.placed.get(names.CONTROL if role in (names.PREPARE, GATEWAY.name) else role, {})
        return {part: place[part] for part in ("metadata", "spec") if part in place}
    if scheduling.gang == "volcano":
        annotations = {"scheduling.k8s.io/group-name": group_name(known)} if is_member else {}
        queue = {"scheduling.volcano.sh/queue-name": scheduling.queue} if scheduling.queue else {}
        return {"metadata": {"annotations": annotations | queue}, "spec": {"schedulerName": "volcano"}}
    if scheduling.gang == "coscheduling":
        labels = {"scheduling.x-k8s.io/pod-group": group_name(known)} if is_member else {}
        return {"metadata": {"labels": labels}, "spec": {"schedulerName": known.settings.coscheduler}}
    return {}


# Keys that identify list items; default `name`.
_MERGE_KEYS = {"volumeMounts": "mountPath", "ports": "containerPort", "imagePullSecrets": "name", "hostAliases": "ip"}


def merged(base: Mapping[Any, Any], change: Mapping[Any, Any]) -> dict[str, Any]:
    """Merge changes into a pod like `kubectl patch`: maps recursively, lists by key; null removes.

    >>> merged({"env": [{"name": "A", "value": "1"}], "x": 1}, {"env": [{"name": "A", "value": "2"}], "x": None})
    {'env': [{'name': 'A', 'value': '2'}]}
    """
    result = dict(base)
    for name, value in change.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(result.get(name), Mapping):
            result[name] = merged(result[name], value)
        elif _is_list(value) and _is_list(result.get(name)):
            result[name] = _merged_lists(result[name], value, name)
        else:
            result[name] = value
    return result


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _merged_lists(base: Sequence[Any], change: Sequence[Any], name: str) -> list[Any]:
    """Merge items of the list field `name` by key, replace lists of text, and keep only one source per volume."""
    key = _MERGE_KEYS.get(name, "name")
    if not all(isinstance(item, Mapping) for item in (*base, *change)):
        return list(change)
    result = list(base)
    for item in change:
        index = next((i for i, each in enumerate(base) if key in item and each.get(key) == item[key]), None)
        if index is not None:
            both = merged(result[index], item)
            result[index] = {field: both[field] for field in item if field in both} if name == "volumes" else both
        elif item not in result:
            result.append(item)
    return result


_PARTS = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([+-]?[0-9]{1,2})|([numkMGTPE]|[KMGTPE]i))?")
_POWERS = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def amount(said: int | str | None) -> Decimal:
    """Return a Kubernetes quantity as a number; 0 if missing or invalid.

    >>> [float(amount(text)) for text in (8, "3500m", "1k", "2Gi", "1e0")]
    [8.0, 3.5, 1000.0, 2147483648.0, 1.0]
    >>> amount("many")
    Decimal('0')
    """
    found = _PARTS.fullmatch(str(said))
    if found is None:
        return Decimal(0)
    number, exponent, suffix = found.groups()
    if suffix and suffix.endswith("i"):
        return Decimal(number) * Decimal(1024) ** ("KMGTPE".index(suffix[0]) + 1)
    return Decimal(number).scaleb(int(exponent or _POWERS.get(suffix or "", 0)))

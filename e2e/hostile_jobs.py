"""RLHFJobs that somebody wrote to do harm, or without thinking: what the API server refuses, what the operator says of
those that are taken, and those that are taken and do none.

    >>> len(REFUSED) + len(TOLD) + len(HARMLESS) >= 60
    True
    >>> manifest("absurd", {"roles.generator.workers": 3})["spec"]["roles"]
    {'generator': {'workers': 3}}
"""

from __future__ import annotations

import json
from typing import Any

from invalid_jobs import FUNCTION, HTTP, edited

from rlhfspec.cluster import names

Edits = dict[str, Any]
UNKNOWN_UID = "00000000-0000-4000-8000-000000000000"
TEMPLATE = "roles.prepare.podTemplate"
SPEC = f"{TEMPLATE}.spec"
TERMS = f"{SPEC}.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"


def manifest(name: str, edits: Edits) -> dict[str, Any]:
    """`edits`: what is put where in spec, or, with a leading slash, in the job."""
    return edited({"/metadata.name": name, **edits})


def container(**fields: Any) -> Edits:
    return {f"{SPEC}.containers": [{"name": "worker", **fields}]}


def volume(**source: Any) -> Edits:
    return {f"{SPEC}.volumes": [{"name": "v", **source}]}


def gpus(said: Any) -> Edits:
    return {"roles.prepare.resources": {"limits": {"nvidia.com/gpu": said}}}


def owner(kind: str, name: str, **fields: Any) -> Edits:
    version = f"{names.GROUP}/{names.VERSION}"
    return {"/metadata.ownerReferences": [{"apiVersion": version, "kind": kind, "name": name, **fields}]}


# What is refused, and a word of the refusal.
REFUSED: dict[str, tuple[Edits, str]] = {
    # numbers
    "workers-2e9": ({"roles.generator.workers": 2_000_000_000}, "roles.generator.workers"),
    "workers-20000": ({"roles.generator.workers": 20_000}, "roles.generator.workers"),
    "workers-minus": ({"roles.generator.workers": -1}, "roles.generator.workers"),
    "workers-half": ({"roles.generator.workers": 1.5}, "roles.generator.workers"),
    "workers-word": ({"roles.generator.workers": "many"}, "roles.generator.workers"),
    "replicas-turned": ({"roles.generator.replicas": {"min": 4, "max": 2}}, "replicas.min"),
    "replicas-20000": ({"roles.generator.replicas": {"min": 1, "max": 20_000}}, "replicas.max"),
    "ranks-1e6": ({"roles.trainer.ranksPerNode": 1_000_000}, "roles.trainer.ranksPerNode"),
    "steps-2e60": ({"training.steps": 2**60}, "training.steps"),
    "deadline-1e12": ({"activeDeadlineSeconds": 10**12}, "activeDeadlineSeconds"),
    "deadline-starting-1e12": ({"preRunningDeadlineSeconds": 10**12}, "preRunningDeadlineSeconds"),
    "backoff-1e300": ({"failurePolicy.backoffSeconds": 1e300}, "backoffSeconds"),
    "restarts-2e40": ({"failurePolicy.maxRestarts": 2**40}, "maxRestarts"),
    "exit-code-256": ({"failurePolicy.rules": [{"exitCodes": [256], "action": "Ignore"}]}, "exitCodes"),
    "exit-codes-1000": ({"failurePolicy.rules": [{"exitCodes": [1] * 1000, "action": "Ignore"}]}, "exitCodes"),
    "gpus-minus": (gpus("-1"), "nvidia.com/gpu"),
    "gpus-fraction-sign": (gpus("½"), "nvidia.com/gpu"),
    "gpus-hexadecimal": (gpus("0x10"), "nvidia.com/gpu"),
    "gpus-nan": (gpus("NaN"), "nvidia.com/gpu"),
    "gpus-list": (gpus([1]), "nvidia.com/gpu"),
    # names and texts
    "name-unicode": ({"/metadata.name": "sümms"}, "metadata.name"),
    "name-bell": ({"/metadata.name": "sums\a"}, "metadata.name"),
    "name-escape": ({"/metadata.name": "\x1b[2Jsums"}, "metadata.name"),
    "name-newline": ({"/metadata.name": "sums\n"}, "metadata.name"),
    "name-up": ({"/metadata.name": "../../secrets"}, "metadata.name"),
    "name-long": ({"/metadata.name": "x" * 64}, "metadata.name"),
    "text-1mb": ({"model.path": "x" * 1_000_000}, "model.path"),
    "label-value": ({"/metadata.labels": {"a": "not a value!"}}, "metadata.labels"),
    "annotations-300kb": ({"/metadata.annotations": {"a": "x" * 300_000}}, "metadata.annotations"),
    "object-2mb": ({f"{SPEC}.affinity": {"x": "y" * 2_000_000}}, "too large"),
    "object-4mb": ({f"{SPEC}.affinity": {"x": "y" * 4_000_000}}, "too large"),
    "digits-5000": ({f"{SPEC}.priority": "DIGITS"}, "number"),
    "image-513": ({"roles.prepare.image": "x" * 513}, "roles.prepare.image"),
    "restart-id-64": ({"restart.id": "x" * 64}, "restart.id"),
    "restart-no-id": ({"restart.roles": ["reward"]}, "restart.id"),
    "restart-operator": ({"restart": {"id": "1", "roles": ["operator"]}}, "restart.roles"),
    "gang": ({"scheduling.gang": "slurm"}, "scheduling.gang"),
    # places
    "folder-up": ({"storage.runFolder": "../../etc"}, "runFolder"),
    "folder-within-up": ({"storage.runFolder": "a/../../b"}, "runFolder"),
    "folder-root": ({"storage.runFolder": "/etc"}, "runFolder"),
    "store-file": ({"storage.uri": "file:///etc/passwd"}, "storage.uri"),
    "store-and-claim": ({"storage": {"uri": "s3://a/b", "claim": "c"}}, "storage.uri"),
    "secret-alone": ({"storage.secret": "operator-keys"}, "storage.secret"),
    # lists
    "rewards-twins": ({"rewards.sources": [FUNCTION, FUNCTION]}, "rewards.sources"),
    "rewards-none": ({"rewards.sources": []}, "rewards.sources"),
    "rewards-1000": ({"rewards.sources": [FUNCTION | {"name": str(each)} for each in range(1000)]}, "rewards.sources"),
    "rewards-slow": ({"rewards.sources": [HTTP | {"timeoutSeconds": 1e9}]}, "timeoutSeconds"),
    # what a pod would have of the job
    "template-our-label": ({f"{TEMPLATE}.metadata.labels": {names.JOB: "another"}}, "reserved for the operator"),
    "template-our-annotation": (
        {f"{TEMPLATE}.metadata.annotations": {names.RESTART_ID: "1"}},
        "reserved for the operator",
    ),
    "template-restarts": ({f"{SPEC}.restartPolicy": "Always"}, "restartPolicy"),
    "template-nameless": ({f"{SPEC}.containers": [{"image": "x"}]}, "containers[0].name"),
    "template-65": ({f"{SPEC}.volumes": [{"name": f"v{each}"} for each in range(65)]}, "volumes"),
    # what belongs to Kubernetes
    "owner-no-uid": (owner(names.KIND, "another"), "uid"),
}

ADDED = {"capabilities": {"add": ["SYS_ADMIN"]}}
SIDECAR = {"name": "s", "image": "s", "restartPolicy": "Always"}
KEY = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "a"}}}
TOKEN = {"sources": [{"serviceAccountToken": {"path": "a"}}]}
METADATA = {"name": "else", "namespace": "calm", "ownerReferences": [], "labels": {}}
# What is taken, and what it says in less than ten seconds: a reason, and a word of its message.
TOLD: dict[str, tuple[Edits, str, str]] = {
    "workers-9000": ({"roles.generator.workers": 9_000}, "BadConfig", "jobs.maxWorkers"),
    "env-name": (container(env=[{"name": ["x"]}]), "", "env"),
    "env-map": (container(env={"a": 1}), "", "env"),
    "env-value": (container(env=[{"name": "X", "value": 1}]), "", "env"),
    "env-no-name": (container(env=[{"name": "a=b"}]), "", "env"),
    "ports": (container(ports="all"), "", "ports"),
    "image-list": (container(image=["x"]), "", "image"),
    "command-number": (container(command=7), "", "command"),
    "mounts-word": (container(volumeMounts="x"), "", "volumeMounts"),
    "grace-word": ({f"{SPEC}.terminationGracePeriodSeconds": "soon"}, "", "terminationGracePeriodSeconds"),
    "user-word": ({f"{SPEC}.securityContext": {"runAsUser": "me"}}, "BadConfig", "securityContext"),
    "grace-2e70": ({f"{SPEC}.terminationGracePeriodSeconds": 2**70}, "", "terminationGracePeriodSeconds"),
    "tolerations-map": ({f"{SPEC}.tolerations": {"key": "x"}}, "", "tolerations"),
    "selector-list": ({f"{SPEC}.nodeSelector": [1]}, "", "nodeSelector"),
    "affinity-word": ({f"{SPEC}.affinity": "near"}, "", "affinity"),
    "unknown-field": ({f"{SPEC}.hostNetwrok": True}, "", "hostNetwrok"),
    "gpus-half": (gpus("0.5"), "", "nvidia.com/gpu"),
    "label": ({f"{TEMPLATE}.metadata.labels": {"not a label!": "x"}}, "", "label"),
    "label-empty": ({f"{TEMPLATE}.metadata.labels": {"": "x"}}, "", "label"),
    "priority": ({f"{SPEC}.priority": 2_000_000_000}, "", "priority"),
    "priority-class": ({"scheduling.priorityClass": "no-such-class"}, "", "no-such-class"),
    "runtime-class": ({f"{SPEC}.runtimeClassName": "no-such-runtime"}, "BadConfig", "runtimeClassName"),
    "account": ({f"{SPEC}.serviceAccountName": "no-such-account"}, "BadConfig", "serviceAccountName"),
    "limits-below-requests": (
        {"roles.prepare.resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}, "", "less than or equal"),
    "manifest-600kb": ({TERMS: "TERMS 4000 63"}, "", "ConfigMap"),
    "wrong-400-times": ({TERMS: "TERMS 400 64"}, "", "must be no more than 63"),
    "deep": ({f"{SPEC}.affinity": "DEEP 500"}, "", "affinity"),
    # what jobs.allowed does not list
    "secret": (volume(secret={"secretName": "keys"}), "BadConfig", "Secret keys does not exist, or has no label"),
    "secret-variable": (container(env=[KEY]), "BadConfig", "Secret keys"),
    "claim": ({"storage.claim": "no-such-claim"}, "BadConfig", "PersistentVolumeClaim no-such-claim"),
    "token": (volume(projected=TOKEN), "BadConfig", "serviceAccountToken"),
    "command": (container(command=["sh"]), "BadConfig", "command"),
    "path": (container(env=[{"name": "PYTHONPATH", "value": "/storage"}]), "BadConfig", "env[0].name"),
    "image": ({"roles.prepare.image": "mine"}, "BadConfig", "roles.prepare.image"),
    "host-path": ({f"{SPEC}.volumes": [{"name": "host", "hostPath": {"path": "/"}}]}, "", "hostPath"),
    "host-network": ({f"{SPEC}.hostNetwork": True}, "BadConfig", "hostNetwork"),
    "host-processes": ({f"{SPEC}.hostPID": True}, "BadConfig", "hostPID"),
    "host-port": (container(ports=[{"containerPort": 80, "hostPort": 80}]), "BadConfig", "ports"),
    "privileged": (container(securityContext={"privileged": True}), "", "privileged"),
    "capabilities": (container(securityContext=ADDED), "BadConfig", "capabilities.add"),
    "root": ({f"{SPEC}.securityContext": {"runAsUser": 0}}, "BadConfig", "securityContext"),
    "context-removed": ({f"{SPEC}.securityContext": None}, "BadConfig", "securityContext"),
    "command-removed": (container(command=None), "BadConfig", "command"),
    "sidecar": ({f"{SPEC}.initContainers": [SIDECAR]}, "BadConfig", "initContainers[0].image"),
}  # fmt: skip

# What is taken and harms nobody: each waits for a node as any job would here, and its pod is the operator's.
HARMLESS: dict[str, Edits] = {
    "gpus-kilo": gpus("1k"),
    "gpus-point": gpus("1.0"),
    "gpus-power": gpus("1e0"),
    "gpus-1e30": gpus("1e30"),
    "metadata": {f"{TEMPLATE}.metadata": METADATA},  # the API server drops all but labels
    "our-labels-in-a-pod": {f"{TEMPLATE}.metadata.labels": {names.MANAGED_BY: "me", names.NAME: "another"}},
    "our-labels": {"/metadata.labels": {names.MANAGED_BY: names.FIELD_MANAGER, names.JOB: "b", names.ROLE: "trainer"}},
    "our-annotations": {"/metadata.annotations": {names.RESTART_ID: "9", names.RUN: "3a9d33b1"}},
    "annotations-200kb": {"/metadata.annotations": {"a": "ü" * 100_000}},
    "control-characters": {"dataset.split": "\x1b[2J\a\u202e\u0000", "model.path": "\x1b]0;x\a"},
    "traversal-by-dots": {"storage.runFolder": "./a//b/./c"},
    "finalizer": {"/metadata.finalizers": ["evil.example/never"]},
    "no-containers": {f"{SPEC}.containers": None},
    "workers-twice": {f"{SPEC}.containers": [{"name": "worker"}, {"name": "worker"}]},
    "status": {"/status": {"phase": "Succeeded", "internal": {"number": 7}, "startTime": "2020-01-01T00:00:00Z"}},
    "finalizer-short": {"/metadata.finalizers": ["stay"]},
    "grace-1e9": {f"{SPEC}.terminationGracePeriodSeconds": 1_000_000_000},
    "node-name-selector": {f"{SPEC}.nodeSelector": {"a": "b" * 60}},
    "manifest-200kb": {TERMS: "TERMS 800 63"},
}


def as_text(job: dict[str, Any]) -> str:
    """JSON as it is sent: what Python itself would not write stands in the manifest as a word."""
    text = json.dumps(job)
    text = text.replace('"DIGITS"', "1" + "0" * 5000)
    text = text.replace('"DEEP 500"', '{"a":' * 500 + "1" + "}" * 500)
    for num, length in ((800, 63), (4000, 63), (400, 64)):
        terms = {"nodeSelectorTerms": [_term(f"{each:0{length}}") for each in range(num)]}
        text = text.replace(f'"TERMS {num} {length}"', json.dumps(terms))
    return text


def _term(value: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": "zone", "operator": "In", "values": [value]}]}

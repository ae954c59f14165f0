"""Objects as the API server sends them to the operator's cache."""

from typing import Any

from rlhfspec.cluster import names


def job(uid: str = "j1", version: int = 1) -> dict[str, Any]:
    metadata = {"namespace": "team", "name": "sums", "uid": uid, "resourceVersion": str(version)}
    return {"metadata": metadata | {"creationTimestamp": "2026-01-01T00:00:00Z"}, "spec": {}}


def pod(uid: str = "p1", version: int = 1, phase: str = "Pending", worker: int = 0) -> dict[str, Any]:
    metadata = {
        "namespace": "team",
        "name": names.pod_name("sums", "reward", worker),
        "uid": uid,
        "resourceVersion": str(version),
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": names.labels_of("sums", "reward", worker),
        "ownerReferences": [{"kind": "RLHFJob", "name": "sums", "uid": "j1", "controller": True}],
    }
    return {"metadata": metadata, "status": {"phase": phase}}

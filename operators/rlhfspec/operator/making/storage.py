"""Storage of a job's pods, of which only `prepare` can write outside the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhfspec.cluster import names
from rlhfspec.operator.deciding.allowed import CONTAINERS, containers_of
from rlhfspec.operator.deciding.situation import Situation

_VOLUME = "storage"
_WRITERS = ("control", "generator", "trainer", "rebalancer", "gateway")  # others write only traces


def volume(known: Situation) -> dict[str, Any]:
    """Return the storage volume, an emptyDir if the job uses an object store."""
    storage = known.spec.storage
    if storage.uri is not None:
        return {"name": _VOLUME, "emptyDir": {}}
    claim = storage.claim or known.settings.claim
    return {"name": _VOLUME, "persistentVolumeClaim": {"claimName": claim}}


def mounts(known: Situation, role: str) -> list[dict[str, Any]]:
    whole = {"name": _VOLUME, "mountPath": str(names.STORAGE)}
    if _writes_all(known, role):
        return [whole]
    folder = known.run_folder  # made by `prepare`: the kubelet would make it as root
    own = {"name": _VOLUME, "mountPath": str(folder), "subPath": str(folder.relative_to(names.STORAGE))}
    writes = role in _WRITERS or known.spec.observability.traces
    return [{**whole, "readOnly": True}, *([own] if writes else [])]


def variables(known: Situation, role: str) -> dict[str, str]:
    """Return the environment variables for cache folders; HF_HOME must be writable."""
    shared = _writes_all(known, role)
    return {
        "RLHFSPEC_CACHE": str(names.CACHE),
        "RLHFSPEC_KEPT": str(known.run_folder / ".kept"),
        "HF_HOME": str(names.CACHE / "huggingface") if shared else "/tmp/huggingface",
    }


def protect_claims(known: Situation, role: str, spec: dict[str, Any], cluster: Mapping[Any, Any]) -> None:
    """Make mounts of claims read-only, except those that the operator or the chart adds."""
    ours = next(
        each for each in (*cluster.get("spec", {}).get("volumes", ()), volume(known)) if each["name"] == _VOLUME
    )
    kept = [mount for each in containers_of(cluster) for mount in each.get("volumeMounts") or ()]
    kept += mounts(known, role) if ours in spec["volumes"] else []
    claims = {each["name"] for each in spec["volumes"] if "persistentVolumeClaim" in each}

    def protected(mount: Any) -> Any:
        is_a_jobs = isinstance(mount, Mapping) and mount.get("name") in claims and mount not in kept
        return {**mount, "readOnly": True} if is_a_jobs else mount

    for kind in CONTAINERS:
        if kind in spec:
            spec[kind] = [
                {**each, "volumeMounts": [protected(mount) for mount in each["volumeMounts"]]}
                if isinstance(each.get("volumeMounts"), list)
                else each
                for each in spec[kind]
            ]


def _writes_all(known: Situation, role: str) -> bool:
    return role == names.PREPARE or known.spec.storage.uri is not None

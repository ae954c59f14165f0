"""Jobs from the API server. Lists are fetched on demand and cached briefly."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from rlhfspec.cluster import names
from rlhfspec.cluster.api import JOB_VERSION, Api, from_each
from rlhfspec.dashboard.jobs.folder import shown
from rlhfspec.dashboard.jobs.kept import Kept
from rlhfspec.dashboard.jobs.source import Address, Condition, JobDetail, JobHead, JobKey, Pod, RunFolderInfo, RunPlace
from rlhfspec.errors import ClusterRefused, InvalidRequest
from rlhfspec.runs.live.redis_users import DASHBOARD

_CACHED_LIST_SECONDS = 2.0
_MAX_MESSAGE_CHARACTERS = 500  # of a message
log = logging.getLogger("rlhfspec.dashboard")
SPEAKING = ("Starting", "Running", "Suspending")  # phases in which a run sends live signals


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """NATS and Redis of the release. `storage`: mount path of the claim `storage_claim`, if any."""

    nats_url: str | None = None
    redis_url: str | None = None
    credentials: Path | None = None
    storage: Path | None = None
    storage_claim: str = ""
    storage_namespace: str = ""


class ClusterSource:
    """Job source of the API server. Empty `namespaces`: the whole cluster."""

    def __init__(self, api: Api, servers: Servers, *, namespaces: Sequence[str] = ()) -> None:
        self._api = api
        self._servers = servers
        self._namespaces = tuple(namespaces) or ("",)
        self._refused: set[str] = set()
        self._jobs: Kept[Mapping[JobKey, dict[str, Any]]] = Kept(seconds=_CACHED_LIST_SECONDS)
        self._pods: Kept[Sequence[dict[str, Any]]] = Kept(seconds=_CACHED_LIST_SECONDS)

    async def jobs(self) -> Sequence[JobHead]:
        return [head_of(job) for job in (await self._jobs.get("", self._all)).values()]

    async def job(self, key: JobKey) -> JobDetail:
        job = await self._found(key)
        pods = await self._pods.get(key, lambda: self._listed("v1", "Pod", key.namespace, f"{names.JOB}={key.name}"))
        return JobDetail(
            head=head_of(job),
            run=str(_at(job, "status", "run").get("uid", "")),
            folder=self._run_folder(key, job),
            conditions=tuple(map(_condition, _list(_at(job, "status").get("conditions")))),
            pods=tuple(sorted(map(pod_of, pods), key=_in_order)),
            last_words={str(pod["metadata"]["name"]): words for pod in pods if (words := last_words_of(pod))},
        )

    async def manifest(self, key: JobKey) -> dict[str, Any]:
        job = await self._found(key)
        return job | {"metadata": {name: said for name, said in job["metadata"].items() if name != "managedFields"}}

    async def place(self, key: JobKey) -> RunPlace:
        job = await self._found(key)
        return RunPlace(folder=self._folder(key, job), address=self._address(job))

    async def close(self) -> None: ...

    async def _listed(self, version: str, kind: str, namespace: str, labels: str = "") -> list[dict[str, Any]]:
        found = self._api.list(version, kind, namespace or None, labels=labels, cached=True)
        return [each async for each in found]

    async def _all(self) -> Mapping[JobKey, dict[str, Any]]:
        found: dict[JobKey, dict[str, Any]] = {}
        refused: dict[str, ClusterRefused] = {}
        async for namespace, jobs in from_each(self._namespaces, partial(self._listed, JOB_VERSION, names.KIND)):
            if isinstance(jobs, ClusterRefused):
                refused[namespace] = jobs
            else:
                found |= {JobKey(job["metadata"]["namespace"], job["metadata"]["name"]): job for job in jobs}
        for namespace in refused.keys() - self._refused:
            log.warning("jobs of namespace %s are not shown: %s", namespace, refused[namespace])
        self._refused = set(refused)
        if len(refused) == len(self._namespaces):
            raise refused[self._namespaces[0]]
        return found

    async def _found(self, key: JobKey) -> dict[str, Any]:
        job = (await self._jobs.get("", self._all)).get(key)
        if job is None:
            raise InvalidRequest("job", str(key)[:300], "does not exist")
        return job

    def _run_folder(self, key: JobKey, job: dict[str, Any]) -> RunFolderInfo:
        told, storage = str(_at(job, "status", "run").get("folder") or ""), _at(job, "spec", "storage")
        if not told:
            return RunFolderInfo()
        uri, claim = storage.get("uri"), storage.get("claim") or self._servers.storage_claim
        place = str(uri) if uri else f"claim {claim}" if claim else "the claim that its pods mount"
        return RunFolderInfo(path=told, place=place, fetch=f"kubectl rlhf get-run {key.name} -n {key.namespace}")

    def _address(self, job: dict[str, Any]) -> Address | None:
        status = _at(job, "status")
        uid = _at(job, "status", "run").get("uid")
        if not uid or status.get("phase") not in SPEAKING:
            return None
        return Address(
            job=job["metadata"]["name"],
            uid=str(uid),
            nats_url=self._servers.nats_url,
            redis_url=self._servers.redis_url,
            credentials=self._servers.credentials,
            role=DASHBOARD,
        )

    def _folder(self, key: JobKey, job: dict[str, Any]) -> Path | None:
        """Return the job's run folder, or None if it is not on the mounted claim."""
        storage, wanted = self._servers.storage, _at(job, "spec", "storage")
        claim = wanted.get("claim")
        if storage is None or wanted.get("uri") is not None or key.namespace != self._servers.storage_namespace:
            return None
        if claim is not None and claim != self._servers.storage_claim:
            return None
        told = _at(job, "status", "run").get("folder") or names.run_folder(key.name, str(job["metadata"]["uid"]))
        path = PurePosixPath(str(told))
        if not path.is_relative_to(names.STORAGE):
            return None
        folder = storage / path.relative_to(names.STORAGE)
        inside = folder.resolve().is_relative_to(storage.resolve())  # a link may lead elsewhere
        return folder if inside and folder.is_dir() else None


def head_of(job: Mapping[str, Any]) -> JobHead:
    """Return a job's row in the job list. Unset fields are empty.

    >>> job = {"metadata": {"namespace": "a", "name": "sums"}, "spec": {"algorithm": {"name": "grpo"}},
    ...        "status": {"phase": "Running", "progress": {"step": 3, "totalSteps": 9, "reward": 0.5}, "gpus": 4}}
    >>> head = head_of(job)
    >>> head.phase, head.step, head.total_steps, head.reward, head.gpus, head.kl
    ('Running', 3, 9, 0.5, 4, None)
    """
    metadata, status, progress = _at(job, "metadata"), _at(job, "status"), _at(job, "status", "progress")
    reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    return JobHead(
        namespace=str(metadata["namespace"]),
        name=str(metadata["name"]),
        phase=str(status.get("phase") or "Pending"),
        algorithm=str(_at(job, "spec", "algorithm").get("name", "")),
        model=str(_at(job, "spec", "model").get("path", "")),
        step=int(progress.get("step") or 0),
        total_steps=int(progress.get("totalSteps") or _at(job, "spec", "training").get("steps") or 0),
        reward=_number(progress.get("reward")),
        kl=_number(progress.get("kl")),
        tokens_per_second=_number(progress.get("tokensPerSecond")),
        accepted_per_verification=_number(progress.get("acceptedPerVerification")),
        eta_seconds=_number(progress.get("etaSeconds")),
        generators=int(status.get("generators") or 0),
        gpus=int(status.get("gpus") or 0),
        restarts=int(_at(job, "status", "restarts").get("total") or 0),
        created=_unix(metadata.get("creationTimestamp")),
        started=_unix(status.get("startTime")),
        ended=_unix(status.get("completionTime")),
        message=shown(": ".join(filter(None, (reason, message))), 2 * _MAX_MESSAGE_CHARACTERS),
    )


def _condition(found: Mapping[str, Any]) -> Condition:
    return Condition(
        type=str(found.get("type", "")),
        status=str(found.get("status", "")),
        reason=str(found.get("reason") or ""),
        message=shown(str(found.get("message") or ""), 2 * _MAX_MESSAGE_CHARACTERS),
        since=_unix(found.get("lastTransitionTime")),
    )


def pod_of(pod: Mapping[str, Any]) -> Pod:
    """Return a pod as the page shows it.

    >>> ended = {"terminated": {"reason": "Error", "exitCode": 1, "message": "the end of its log"}}
    >>> pod_of({"metadata": {"name": "sums-reward-0"}, "status": {"containerStatuses": [{"state": ended}]}}).message
    'Error, exit code 1'
    """
    metadata, status = _at(pod, "metadata"), _at(pod, "status")
    labels, statuses = _at(pod, "metadata", "labels"), _list(status.get("containerStatuses"))
    said = " ".join(filter(None, map(_state, statuses))) or str(status.get("message") or "")
    return Pod(
        name=str(metadata["name"]),
        role=str(labels.get(names.ROLE, "")),
        worker=str(labels.get(names.WORKER, "")),
        phase="Terminating" if metadata.get("deletionTimestamp") else str(status.get("phase") or "Pending"),
        ready=bool(statuses) and all(each.get("ready") for each in statuses),
        node=str(_at(pod, "spec").get("nodeName") or ""),
        restarts=sum(int(each.get("restartCount") or 0) for each in statuses),
        since=_unix(metadata.get("creationTimestamp")),
        message=shown(" ".join(said.split()), _MAX_MESSAGE_CHARACTERS),
    )


def _state(container: Mapping[str, Any]) -> str:
    """Return the container state, without text that its process wrote."""
    waiting, ended = _at(container, "state", "waiting"), _at(container, "state", "terminated")
    if ended:
        return f"{ended.get('reason') or 'Ended'}, exit code {ended.get('exitCode')}"
    return ": ".join(filter(None, (waiting.get("reason"), waiting.get("message"))))


def last_words_of(pod: Mapping[str, Any]) -> str:
    """Return the termination messages of the pod's containers."""
    return " ".join(" ".join(dict.fromkeys(_last_words(pod))).split())[-_MAX_MESSAGE_CHARACTERS:]


def _last_words(pod: Mapping[str, Any]) -> Iterator[str]:
    for statuses in ("initContainerStatuses", "containerStatuses"):
        for container in _list(_at(pod, "status").get(statuses)):
            for when in ("state", "lastState"):
                if said := _at(container, when, "terminated").get("message"):
                    yield str(said)


def _in_order(pod: Pod) -> tuple[int, int, str]:
    place = names.ROLES.index(pod.role) if pod.role in names.ROLES else len(names.ROLES)
    return (place, int(pod.worker) if pod.worker.isdecimal() else 0, pod.name)


def _at(content: Mapping[str, Any], *path: str) -> dict[str, Any]:
    found: Any = content
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}


def _list(found: Any) -> list[Mapping[str, Any]]:
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def _number(value: Any) -> float | None:
    """Parse a number, which the API server may write as text."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def _unix(text: Any) -> float | None:
    try:
        return None if text is None else datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None

"""The API server as the dashboard asks it: lists of jobs and pods, and which users may see them. It never writes."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlhfspec.cluster import names
from rlhfspec.cluster.access import KubeAccess
from rlhfspec.cluster.api import JOB_VERSION, Api
from rlhfspec.errors import ClusterRefused, ClusterUnavailable, ServerFailed

Json = dict[str, Any]
A = TypeVar("A")


class ApiServer:
    """Raises ServerFailed, in one line, where it does not answer or refuses the dashboard itself."""

    def __init__(self, api: Api) -> None:
        self._api = api

    @classmethod
    async def connect(cls, kubeconfig: Path | None = None) -> ApiServer:
        """As the pod's service account, or by a file. Nothing is asked twice: somebody waits for the page."""
        access = KubeAccess(None if kubeconfig is None else str(kubeconfig))
        return cls(await Api(access, agent="rlhfspec-dashboard", deadline_seconds=0.0).__aenter__())

    async def close(self) -> None:
        await self._api.__aexit__(None, None, None)

    async def jobs(self, namespace: str = "") -> Sequence[Json]:
        """Empty: of all namespaces."""
        return await _answered("list rlhfjobs", self._list(JOB_VERSION, names.KIND, namespace))

    async def pods(self, namespace: str, job: str) -> Sequence[Json]:
        return await _answered("list pods", self._list("v1", "Pod", namespace, labels=f"{names.JOB}={job}"))

    async def _list(self, version: str, kind: str, namespace: str, *, labels: str = "") -> list[Json]:
        found = self._api.list(version, kind, namespace or None, labels=labels, cached=True)
        return [each async for each in found]

    async def review_token(self, token: str) -> Json | None:
        """Whose it is; None: no user's."""
        status = await _answered("create tokenreviews", self._api.review_token(token))
        user: Json | None = status.get("user") if status.get("authenticated") else None
        return user

    async def review_access(self, user: Json, attributes: Json) -> bool:
        status = await _answered("create subjectaccessreviews", self._api.review_access(user, attributes))
        return bool(status.get("allowed")) and not status.get("denied")


async def _answered(what: str, asked: Awaitable[A]) -> A:
    try:
        return await asked
    except ClusterRefused as error:
        raise ServerFailed("API server", f"does not let the dashboard {what}: {error.problem}") from None
    except ClusterUnavailable as error:
        raise ServerFailed("API server", f"{what}: {error.problem}") from None

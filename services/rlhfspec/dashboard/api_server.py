"""The API server as the dashboard asks it: lists of jobs and pods, and who may see them. It never writes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from kubernetes.aio import client, config

from rlhfspec.cluster import names
from rlhfspec.errors import InvalidRequest, ServerFailed

ANSWER_SECONDS = 10.0
A = TypeVar("A")


class ApiServer:
    """Raises ServerFailed, in one line, where it does not answer or refuses the dashboard itself."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api
        self._custom = client.CustomObjectsApi(api)
        self._core = client.CoreV1Api(api)
        self._authentication = client.AuthenticationV1Api(api)
        self._authorization = client.AuthorizationV1Api(api)

    @classmethod
    async def connect(cls, kubeconfig: Path | None = None) -> ApiServer:
        """As the pod's service account, or by a file."""
        try:
            if kubeconfig is None:
                config.load_incluster_config()  # type: ignore[no-untyped-call]
                return cls(client.ApiClient())
            return cls(await config.new_client_from_config(str(kubeconfig)))  # type: ignore[no-untyped-call]
        except config.ConfigException as error:
            raise InvalidRequest("--kubeconfig", str(kubeconfig or "of the pod"), str(error)) from None

    async def close(self) -> None:
        await self._api.close()  # type: ignore[no-untyped-call]

    async def jobs(self, namespace: str = "") -> Sequence[dict[str, Any]]:
        """Empty: of all namespaces."""
        of = (names.GROUP, names.VERSION)
        asked = (
            self._custom.list_namespaced_custom_object(*of, namespace, names.PLURAL, resource_version="0")
            if namespace
            else self._custom.list_cluster_custom_object(*of, names.PLURAL, resource_version="0")
        )
        found: Any = await _answered("list rlhfjobs", asked)
        return list(found["items"])

    async def pods(self, namespace: str, job: str) -> Sequence[client.V1Pod]:
        selector = f"{names.JOB}={job}"
        asked = self._core.list_namespaced_pod(namespace, label_selector=selector, resource_version="0")
        return list((await _answered("list pods", asked)).items)

    async def review_token(self, token: str) -> client.V1UserInfo | None:
        """Whose it is; None: nobody's."""
        review = client.V1TokenReview(spec=client.V1TokenReviewSpec(token=token))
        status = (await _answered("create tokenreviews", self._authentication.create_token_review(review))).status
        return status.user if status is not None and status.authenticated else None

    async def review_access(self, user: dict[str, Any], attributes: dict[str, str]) -> bool:
        spec = client.V1SubjectAccessReviewSpec(**user, resource_attributes=client.V1ResourceAttributes(**attributes))
        review = client.V1SubjectAccessReview(spec=spec)
        asked = self._authorization.create_subject_access_review(review)
        status = (await _answered("create subjectaccessreviews", asked)).status
        return status is not None and bool(status.allowed) and not status.denied


async def _answered(what: str, asked: Awaitable[A]) -> A:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await asked
    except client.ApiException as error:
        refused = error.status in (401, 403)
        reason = f"does not let the dashboard {what}" if refused else f"{what}: {error.status} {error.reason}"
        raise ServerFailed("API server", reason) from None
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        reason = " ".join(str(error).split()) or "no answer in time"
        raise ServerFailed("API server", f"{what}: {reason}") from None

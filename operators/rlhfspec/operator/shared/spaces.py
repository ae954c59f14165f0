"""Setup of labelled namespaces, whose objects outlive the label because pods may use them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from rlhfspec.cluster.api import Api, ApiResponse, Json
from rlhfspec.errors import ClusterUnavailable, LeadershipLost

MADE_ONCE = ("PersistentVolumeClaim", "RoleBinding")  # immutable kinds; existing ones are kept
NAMESPACE_RETRY_SECONDS = 15.0
LOG = logging.getLogger(__name__)


class Spaces:
    def __init__(self, api: Api, kit: Sequence[Json]) -> None:
        self._api = api
        self._kit = kit
        self._namespaces: set[str] = set()
        self._done: set[str] = set()
        self._changed = asyncio.Event()
        self._problems: dict[str, str] = {}

    def joins(self, namespace: str) -> None:
        """Schedule the setup of a new or recreated namespace."""
        self._namespaces.add(namespace)
        self._done.discard(namespace)
        self._changed.set()

    def leaves(self, namespace: str) -> None:
        self._namespaces.discard(namespace)
        self._done.discard(namespace)

    async def work(self) -> None:
        """Set up every namespace, including later and failed ones, until cancelled when this replica stops leading."""
        self._done.clear()
        while True:
            self._changed.clear()
            for namespace in sorted(self._namespaces - self._done):
                self._done.add(namespace)
                problem = await self._furnish(namespace)
                self._say(namespace, problem)
                if problem:
                    self._done.discard(namespace)
            try:
                async with asyncio.timeout(None if self._namespaces <= self._done else NAMESPACE_RETRY_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _furnish(self, namespace: str) -> str:
        """Create the objects that a namespace needs, and return the first problem or an empty text."""
        for thing in self._kit:
            try:
                answer = await self._make(thing | {"metadata": thing["metadata"] | {"namespace": namespace}})
            except (ClusterUnavailable, LeadershipLost) as error:
                return str(error)
            if answer.is_refused:
                return f"{thing['kind']} {thing['metadata']['name']}: {answer.message}"
        return ""

    async def _make(self, thing: Json) -> ApiResponse:
        if thing["kind"] not in MADE_ONCE:
            return await self._api.apply(thing)
        answer = await self._api.create(thing)
        return ApiResponse(200, {}) if answer.code == 409 else answer

    def _say(self, namespace: str, problem: str) -> None:
        if problem and self._problems.get(namespace) != problem:
            LOG.warning("namespace %s is not ready for jobs: %s", namespace, problem)
        elif not problem:
            LOG.info("namespace %s is ready for jobs", namespace)
        self._problems[namespace] = problem

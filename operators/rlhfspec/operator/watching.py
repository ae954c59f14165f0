"""kopf watches jobs, their pods and the warnings about these, and tells the cache; nothing else of kopf is used.

Only `on.event` handlers: kopf then keeps no annotations and no finalizers of its own. What goes while a watch is broken
is never told, so whoever begins to act lists everything first (`resync`), and again when a watch had to begin anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import kopf

from rlhfspec.cluster import names
from rlhfspec.operator.access import Access
from rlhfspec.operator.api import JOB_VERSION, PAGE, Api
from rlhfspec.operator.cache import WARNINGS, Cache, Json, Kind
from rlhfspec.operator.queue import Key

PODS = f"{names.MANAGED_BY}={names.FIELD_MANAGER}"
REQUEST_SECONDS = 30.0
Put = Callable[[Json], Key | None]
LOG = logging.getLogger(__name__)


class Watching:
    """`tell`: which job changed."""

    def __init__(self, cache: Cache, namespaces: Sequence[str], tell: Callable[[Key], None]) -> None:
        self._cache = cache
        self._namespaces = tuple(namespaces)
        self._tell = tell
        self.began_anew = asyncio.Event()  # a watch had to list again: what went meanwhile was never told

    async def run(self, access: Access, stop: asyncio.Event) -> None:
        """Until `stop` is set, or SIGTERM comes."""
        await kopf.operator(
            registry=self._registry(access),
            settings=_settings(),
            namespaces=self._namespaces,
            clusterwide=not self._namespaces,
            standalone=True,
            stop_flag=stop,
        )

    async def wait_until_served(self, api: Api) -> None:
        """Raises ClusterUnavailable until there are RLHFJobs: kopf asks only once what there is."""
        async for _ in api.list(JOB_VERSION, names.KIND, (self._namespaces or (None,))[0]):
            return

    def _registry(self, access: Access) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(access.login)
        self._watch(registry, (names.GROUP, names.VERSION, names.PLURAL), self._cache.put_job, self._cache.remove_job)
        self._watch(registry, ("", "v1", "pods"), self._cache.put_pod, self._cache.remove_pod)
        self._watch(registry, ("", "v1", "events"), self._cache.put_warning, lambda event: None)
        return registry

    def _watch(self, registry: kopf.OperatorRegistry, resource: tuple[str, str, str], put: Put, remove: Put) -> None:
        async def told(event: Any, **_: Any) -> None:
            key = remove(event["object"]) if event["type"] == "DELETED" else put(event["object"])
            if event["type"] is None:
                self.began_anew.set()
            if key is not None:
                self._tell(key)

        kopf.on.event(*resource, id=resource[2], registry=registry)(told)

    async def resync(self, api: Api) -> None:
        """Everything as the API server has it now. Raises ClusterUnavailable."""
        for namespace in self._namespaces or (None,):
            await self._list(api, "job", JOB_VERSION, names.KIND, namespace, "")
            await self._list(api, "pod", "v1", "Pod", namespace, PODS)
            async for event in api.list("v1", "Event", namespace, fields=WARNINGS):
                self._cache.put_warning(event)
        for key in self._cache.jobs():
            self._tell(key)

    async def _list(self, api: Api, kind: Kind, version: str, name: str, namespace: str | None, labels: str) -> None:
        put = self._cache.put_job if kind == "job" else self._cache.put_pod
        before, found = self._cache.uids(kind, namespace), []
        async for thing in api.list(version, name, namespace, labels=labels):
            put(thing)
            found.append(thing["metadata"]["uid"])
        for key in self._cache.listed(kind, before, found):
            self._tell(key)


class _NoDiffs(kopf.DiffBaseStorage):
    """kopf copies every object that it is told of several times over, to compare it with how a handler saw it last.
    We have no such handlers, and this was most of the operator's time."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Nowhere."""


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # needs no right to list CRDs or namespaces
    settings.networking.request_timeout = REQUEST_SECONDS
    settings.watching.chunk_size = PAGE
    settings.watching.label_selectors["", "v1", "pods"] = PODS
    settings.watching.field_selectors["", "v1", "events"] = WARNINGS
    return settings

"""Watches jobs, their pods and the warnings about these, and tells the cache.

Each kind in each namespace is watched by itself: listed, then watched from there. Where that fails, be it that the API
server is away, or that a namespace is gone and our rights with it, that is said once, in the metrics too, and it is
listed anew after a while, longer each time. No other namespace hears of it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rlhfspec.cluster import names
from rlhfspec.cluster.api import JOB_VERSION, Api
from rlhfspec.errors import ClusterRefused, ClusterUnavailable
from rlhfspec.operator import workloads
from rlhfspec.operator.cache import WARNINGS, Cache, Json, Kind
from rlhfspec.operator.queue import Key
from rlhfspec.operator.workloads import Workloads

PODS = f"{names.MANAGED_BY}={names.FIELD_MANAGER}"
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 30.0
Put = Callable[[Json], Key | None]
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """`cached`: what the cache holds of it one by one, so that what is missing in a list is gone."""

    version: str
    kind: str
    put: Put
    remove: Put
    cached: Kind | None = None
    labels: str = ""
    fields: str = ""
    of_cluster: bool = False  # it has no namespace


class Watching:
    """`tell`: which job changed."""

    def __init__(
        self, cache: Cache, namespaces: Sequence[str], tell: Callable[[Key], None], *, kueue: bool = False
    ) -> None:
        self._cache = cache
        self._tell = tell
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._sources = (
            Source(JOB_VERSION, names.KIND, cache.put_job, cache.remove_job, "job"),
            Source("v1", "Pod", cache.put_pod, cache.remove_pod, "pod", labels=PODS),
            Source("v1", "Event", cache.put_warning, lambda event: None, fields=WARNINGS),
            *(_of_kueue(cache.workloads) if kueue else ()),
        )
        self._problems: dict[tuple[str | None, str], str] = {}  # by namespace and kind

    async def run(self, api: Api) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for namespace, source in self._places():
                group.create_task(self._keep(api, source, namespace))

    async def resync(self, api: Api) -> None:
        """Everything that we may see as the API server has it now. Raises ClusterUnavailable when it is away."""
        for namespace, source in self._places():
            try:
                await self._list(api, source, namespace)
            except ClusterRefused as refused:
                self._is(namespace, source, refused)
        for key in self._cache.jobs():
            self._tell(key)

    def problems(self) -> dict[str, str]:
        """By namespace, every one that is watched: why it is not; empty: it is. "": all of the cluster."""
        return {namespace or "": self._problem_of(namespace) for namespace in self._namespaces}

    def _problem_of(self, namespace: str | None) -> str:
        found = (self._problems.get((namespace, source.kind)) for source in self._sources)
        return next((problem for problem in found if problem), "")

    def _places(self) -> Iterator[tuple[str | None, Source]]:
        for source in self._sources:
            for namespace in (None,) if source.of_cluster else self._namespaces:
                yield namespace, source

    async def _keep(self, api: Api, source: Source, namespace: str | None) -> None:
        wait = FIRST_WAIT_SECONDS
        while True:
            try:
                since = await self._list(api, source, namespace)
                wait = FIRST_WAIT_SECONDS
                while True:
                    since = await self._watch(api, source, namespace, since)
            except ClusterUnavailable as error:
                self._is(namespace, source, error)
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    async def _list(self, api: Api, source: Source, namespace: str | None) -> str:
        """The resourceVersion to watch from."""
        before = self._cache.uids(source.cached, namespace) if source.cached else set()
        found, since = [], ""
        async for page in api.pages(source.version, source.kind, namespace, labels=source.labels, fields=source.fields):
            for thing in page["items"]:
                self._take(source.put, thing)
                found.append(thing["metadata"]["uid"])
            since = page["metadata"]["resourceVersion"]
        for key in self._cache.listed(source.cached, before, found) if source.cached else ():
            self._tell(key)
        self._is(namespace, source, None)
        return since

    async def _watch(self, api: Api, source: Source, namespace: str | None, since: str) -> str:
        async for change, thing in api.watch(
            source.version, source.kind, namespace, since, labels=source.labels, fields=source.fields
        ):
            since = thing["metadata"]["resourceVersion"]
            if change != "BOOKMARK":
                self._take(source.remove if change == "DELETED" else source.put, thing)
        return since

    def _take(self, put: Put, thing: Json) -> None:
        try:
            key = put(thing)
        except Exception:  # one object that nobody foresaw is no reason to watch no other
            LOG.exception("%s cannot be read", thing.get("metadata", {}).get("name"))
            return
        if key is not None:
            self._tell(key)

    def _is(self, namespace: str | None, source: Source, problem: ClusterUnavailable | None) -> None:
        before, now = self._problems.get((namespace, source.kind), ""), str(problem or "")
        self._problems[namespace, source.kind] = now
        if now != before:
            where = f"{source.kind}s of {namespace or 'the cluster'}"
            LOG.warning("%s are not watched: %s", where, now) if now else LOG.info("%s are watched again", where)


def _of_kueue(known: Workloads) -> Iterator[Source]:
    """Where Kueue is not installed they are tried again and again, and jobs say that they wait."""
    yield Source(workloads.VERSION, workloads.KIND, known.put, known.remove, "workload", labels=PODS)
    yield Source(workloads.VERSION, workloads.FLAVOR, known.put_flavor, known.remove_flavor, of_cluster=True)
    yield Source(
        workloads.PRIORITY_VERSION, workloads.PRIORITY, known.put_priority, known.remove_priority, of_cluster=True
    )

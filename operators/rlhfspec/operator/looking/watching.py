"""Watches that feed the cache, listed and retried independently for each kind and namespace."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rlhfspec.cluster import names
from rlhfspec.cluster.api import JOB_VERSION, Api, from_each
from rlhfspec.errors import ClusterRefused, ClusterUnavailable
from rlhfspec.operator.looking.cache import WARNINGS, Cache, Json, Kind
from rlhfspec.operator.looking.queue import Key
from rlhfspec.operator.making import workloads
from rlhfspec.operator.making.workloads import Workloads

PODS = f"{names.MANAGED_BY}={names.FIELD_MANAGER}"
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 30.0
Put = Callable[[Json], Key | None]
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WatchSource:
    """Kind to watch; cached objects of kind `cached` that are missing from a list are removed."""

    version: str
    kind: str
    put: Put
    remove: Put
    cached: Kind | None = None
    labels: str = ""
    fields: str = ""


class Informers:
    """Watches of fixed namespaces, or of those with `label`; `joins` and `leaves` receive the names of the latter."""

    def __init__(
        self, cache: Cache, namespaces: Sequence[str], tell: Callable[[Key], None], *, label: str = "",
        joins: Callable[[str], None] = lambda namespace: None, leaves: Callable[[str], None] = lambda namespace: None,
        kueue: bool = False,
    ) -> None:  # fmt: skip
        self._cache = cache
        self._tell = tell
        self._joins, self._leaves = joins, leaves
        self._namespaces: dict[str, list[asyncio.Task[None]]] = {name: [] for name in namespaces}
        self._labelled = WatchSource("v1", "Namespace", self._join, self._leave, labels=label) if label else None
        self._by_uid: dict[str, str] = {}  # namespaces with the label
        self._running: tuple[asyncio.TaskGroup, Api] | None = None
        self._sources = (
            WatchSource(JOB_VERSION, names.KIND, cache.put_job, cache.remove_job, "job"),
            WatchSource("v1", "Pod", cache.put_pod, cache.remove_pod, "pod", labels=PODS),
            WatchSource("v1", "Event", cache.put_warning, lambda event: None, fields=WARNINGS),
            *(_workloads(cache.workloads) if kueue else ()),
        )
        self._of_cluster = tuple(_of_kueue(cache.workloads)) if kueue else ()
        self._problems: dict[tuple[str | None, str], str] = {}  # by namespace and kind

    async def run(self, api: Api) -> None:
        async with asyncio.TaskGroup() as group:
            self._running = (group, api)
            for namespace in self._namespaces:
                self._watch_all_of(namespace)
            for source in (*self._of_cluster, *([self._labelled] if self._labelled else ())):
                group.create_task(self._keep(api, source, None))

    def _watch_all_of(self, namespace: str) -> None:
        if self._running is not None:
            group, api = self._running
            self._namespaces[namespace] = [
                group.create_task(self._keep(api, source, namespace)) for source in self._sources
            ]

    def _join(self, namespace: Json) -> None:
        name, uid = namespace["metadata"]["name"], namespace["metadata"]["uid"]
        is_new = uid not in self._by_uid
        self._by_uid[uid] = name
        if name not in self._namespaces:
            self._namespaces[name] = []
            self._watch_all_of(name)
        if is_new:
            self._joins(name)

    def _leave(self, namespace: Json) -> None:
        name = self._by_uid.pop(namespace["metadata"]["uid"], None)
        if name is None or name in self._by_uid.values():  # recreated under the same name
            return
        for task in self._namespaces.pop(name, ()):
            task.cancel()
        for source in self._sources:
            self._problems.pop((name, source.kind), None)
        self._cache.leave(name)
        self._leaves(name)

    async def resync(self, api: Api) -> None:
        """List all objects again and queue every job; raises ClusterUnavailable."""
        if self._labelled is not None:
            await self._list(api, self._labelled, None)
        places = list(self._places())
        async for (namespace, source), answer in from_each(places, lambda place: self._list(api, place[1], place[0])):
            if isinstance(answer, ClusterRefused):
                self._is(namespace, source, answer)
        for key in self._cache.jobs():
            self._tell(key)

    def problems(self) -> dict[str, str]:
        """Return the watch problem or "" of each namespace; the key "" stands for the watch of namespaces."""
        label = {} if self._labelled is None else {"": self._problems.get((None, self._labelled.kind), "")}
        return label | {namespace: self._problem_of(namespace) for namespace in self._namespaces}

    def watched(self) -> set[str]:
        """Return the namespaces that are completely listed and watched."""
        return {
            namespace
            for namespace in self._namespaces
            if all(self._problems.get((namespace, source.kind)) == "" for source in self._sources)
        }

    def _problem_of(self, namespace: str) -> str:
        found = (self._problems.get((namespace, source.kind)) for source in self._sources)
        return next((problem for problem in found if problem), "")

    def _places(self) -> Iterator[tuple[str | None, WatchSource]]:
        yield from ((None, source) for source in self._of_cluster)
        yield from ((namespace, source) for namespace in self._namespaces for source in self._sources)

    async def _keep(self, api: Api, source: WatchSource, namespace: str | None) -> None:
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

    async def _list(self, api: Api, source: WatchSource, namespace: str | None) -> str:
        """List one kind and return the resourceVersion to watch from."""
        before = self._cache.uids(source.cached, namespace) if source.cached else set()
        found, since = [], ""
        async for page in api.pages(source.version, source.kind, namespace, labels=source.labels, fields=source.fields):
            for thing in page["items"]:
                self._take(source.put, thing)
                found.append(thing["metadata"]["uid"])
            since = page["metadata"]["resourceVersion"]
        for key in self._cache.listed(source.cached, before, found) if source.cached else ():
            self._tell(key)
        if source is self._labelled:
            for uid in self._by_uid.keys() - set(found):
                self._leave({"metadata": {"uid": uid}})
        self._is(namespace, source, None)
        return since

    async def _watch(self, api: Api, source: WatchSource, namespace: str | None, since: str) -> str:
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
        except Exception:  # an unforeseen object must not stop the watch
            LOG.exception("%s cannot be read", thing.get("metadata", {}).get("name"))
            return
        if key is not None:
            self._tell(key)

    def _is(self, namespace: str | None, source: WatchSource, problem: ClusterUnavailable | None) -> None:
        before, now = self._problems.get((namespace, source.kind), ""), str(problem or "")
        self._problems[namespace, source.kind] = now
        if now != before:
            where = f"{source.kind}s of {namespace or 'the cluster'}"
            LOG.warning("%s are not watched: %s", where, now) if now else LOG.info("%s are watched again", where)


def _workloads(known: Workloads) -> Iterator[WatchSource]:
    """Yield the watch of Kueue's Workloads, which is retried forever if Kueue is missing."""
    yield WatchSource(
        workloads.WORKLOAD_VERSION, workloads.WORKLOAD_KIND, known.put, known.remove, "workload", labels=PODS
    )


def _of_kueue(known: Workloads) -> Iterator[WatchSource]:
    yield WatchSource(workloads.WORKLOAD_VERSION, workloads.FLAVOR, known.put_flavor, known.remove_flavor)
    yield WatchSource(workloads.PRIORITY_VERSION, workloads.PRIORITY, known.put_priority, known.remove_priority)

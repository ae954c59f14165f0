"""Replica of the operator, which always watches but acts only while it holds the Lease.

    watches -> cache -> queue -> one reconcile of one job -> writes
    reports ----^                                       (only while the Lease is held, checked before every write)

A new leader labels its pod for the Service of reports, lists everything, and reconciles every job.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rlhfspec.cluster import names
from rlhfspec.cluster.access import KubeAccess
from rlhfspec.cluster.api import Api
from rlhfspec.errors import ClusterUnavailable, LeadershipLost
from rlhfspec.operator.deciding.observed import JobView, Observed, Said, worker_name, worker_of
from rlhfspec.operator.deciding.reconcile import reconcile
from rlhfspec.operator.deciding.situation import ReconcilePlan
from rlhfspec.operator.lease import LEADER_LOOK_SECONDS, Lease
from rlhfspec.operator.looking.cache import Cache
from rlhfspec.operator.looking.looks import Reconciler
from rlhfspec.operator.looking.queue import Key, ReconcileResult, WorkQueue
from rlhfspec.operator.looking.watching import Informers
from rlhfspec.operator.metrics import Metrics, Restarted
from rlhfspec.operator.reports import Reports
from rlhfspec.operator.settings import ChartSettings
from rlhfspec.operator.shared.broker import Dialling
from rlhfspec.operator.shared.leftovers import Runs, Server, Tending
from rlhfspec.operator.shared.spaces import Spaces
from rlhfspec.operator.web import health_app, served, tls_of
from rlhfspec.stage.tasks import ended

WORKERS = 4  # concurrent reconciles; more do not start jobs sooner
_CLUSTER_RETRY_SECONDS = 1.0
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """Pod and addresses of this replica; without `tls` it has no endpoint for reports."""

    pod: str | None
    host: str = "0.0.0.0"
    http_port: int = names.HTTP_PORT
    report_port: int = names.REPORT_PORT
    tls: Path | None = None


class Operator:
    def __init__(self, settings: ChartSettings, place: ReplicaPlace, servers: Sequence[Server]) -> None:
        self._settings = settings
        self._place = place
        self._metrics = Metrics()
        self._cache = Cache(runs_changed=self._runs_changed)
        self._access = KubeAccess()
        identity = f"{place.pod or socket.gethostname()}_{secrets.token_hex(4)}"
        agent = f"{names.FIELD_MANAGER}/{identity}"
        self._lease_api = Api(self._access, agent=agent)  # never queued behind other requests
        self._lease = Lease(self._lease_api, settings.namespace, f"{settings.release}-operator", identity)
        self._api = Api(self._access, may_write=lambda: self._lease.is_held, count=self._metrics.wrote, agent=agent)
        self._reconciler = Reconciler(self._cache, self._api, settings, decide=self._decide)
        self._watch_api = Api(self._access, agent=agent, connections=0)
        self._spaces = Spaces(self._api, settings.namespace_kit)
        self._watching = Informers(
            self._cache, settings.namespaces, self._tell,
            label="" if settings.namespaces else settings.namespace_label,
            joins=self._spaces.joins, leaves=self._spaces.leaves, kueue=settings.kueue,
        )  # fmt: skip
        self._reports = Reports(
            self._cache, self._api.review_token, self._tell, is_acting=lambda: self._lease.is_held and self._is_in_sync
        )
        runs = Runs(self._cache, self._watching.watched, may_act=lambda: self._lease.is_held)
        self._tending = [Tending(server, runs, self._metrics.unfinished) for server in servers]
        urls = {"NATS": settings.nats_url} | ({"Redis": settings.redis_url} if settings.redis_url else {})
        self._dialling = Dialling(urls, self._broker_is)
        self._queue: WorkQueue
        self._is_in_sync = False

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT."""
        self._begin()
        async with AsyncExitStack() as leaving:
            await leaving.enter_async_context(self._lease_api)
            await leaving.enter_async_context(self._api)
            await leaving.enter_async_context(self._watch_api)
            await self._serve(leaving)
            leaving.push_async_callback(self._lease.release)
            stop = asyncio.Event()
            for asked in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(asked, stop.set)
            for work in (self._lease.run(), self._lead(), self._watching.run(self._watch_api)):
                task = asyncio.create_task(work)
                task.add_done_callback(lambda _: stop.set())
                leaving.push_async_callback(_end, task)
            await stop.wait()

    def _begin(self) -> None:
        waited = self._metrics.waited_seconds.observe
        self._queue = WorkQueue(self._reconcile, asyncio.get_running_loop(), waited=waited)
        self._metrics.show(
            queue=lambda: len(self._queue),
            jobs=lambda: len(self._cache.jobs()),
            leader=lambda: float(self._lease.is_held),
            unwatched=self._watching.problems,
            restarts=lambda: restarted(self._cache) if self._lease.is_held else (),
        )

    async def _serve(self, leaving: AsyncExitStack) -> None:
        place, health = self._place, health_app(self._metrics, self._problem)
        await leaving.enter_async_context(served(health, place.host, place.http_port))
        if place.tls is not None:
            reports = served(self._reports.app(), place.host, place.report_port, tls_of(place.tls))
            await leaving.enter_async_context(reports)

    def _problem(self) -> str:
        """Return why the replica is not ready; a standby is ready."""
        return "" if self._lease.was_seen else "the Lease has not been read yet"

    async def _lead(self) -> None:
        acting: asyncio.Task[None] | None = None
        try:
            while True:
                self._lease.changed.clear()
                if acting is not None and (not self._lease.is_held or acting.done()):
                    await _end(acting)
                    acting = None
                if acting is None and self._lease.is_held:
                    acting = asyncio.create_task(self._act())
                    acting.add_done_callback(lambda _: self._lease.changed.set())
                await self._lease.changed.wait()
        finally:
            if acting is not None:
                await _end(acting)

    async def _act(self) -> None:
        self._is_in_sync = False
        await self._until_done(self._label_leader)
        await self._until_done(lambda: self._watching.resync(self._api))
        self._is_in_sync, self._cache.listening_since = True, datetime.now(UTC)
        works = [
            *(self._queue.work() for _ in range(WORKERS)),
            *(tending.run() for tending in self._tending),
            self._spaces.work(),
            self._dialling.run(lambda: bool(self._cache.jobs())),
        ]
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)

    async def _until_done(self, what: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                return await what()
            except (ClusterUnavailable, LeadershipLost) as error:
                LOG.warning("%s", error)
                await asyncio.sleep(_CLUSTER_RETRY_SECONDS)

    async def _label_leader(self) -> None:
        """Move the leader label to this replica's pod."""
        if self._place.pod is None:
            return
        ours, value = self._place.pod, "true"
        labelled = [
            pod["metadata"]["name"]
            async for pod in self._api.list("v1", "Pod", self._settings.namespace, labels=f"{names.LEADER}={value}")
        ]
        for name in labelled:
            if name != ours:
                await self._label(name, None)
        if ours not in labelled:
            await self._label(ours, value)

    async def _label(self, pod: str, value: str | None) -> None:
        patch = {"metadata": {"labels": {names.LEADER: value}}}
        answer = await self._api.merge("v1", "Pod", self._settings.namespace, pod, patch)
        if answer.is_refused and not answer.is_missing:
            raise ClusterUnavailable(f"label of pod {pod}", answer.message)

    def _tell(self, key: Key) -> None:
        self._queue.tell(key)

    def _runs_changed(self) -> None:
        for tending in self._tending:
            tending.tell()

    async def _reconcile(self, key: Key) -> ReconcileResult:
        while not self._lease.is_held:  # until it is renewed, or this task ends
            await asyncio.sleep(LEADER_LOOK_SECONDS)
        began = time.perf_counter()
        result = await self._reconciler.reconcile(key)
        self._metrics.reconcile_seconds.observe(time.perf_counter() - began)
        if result.gone:
            self._reports.forget(key)
        if result.failed:
            self._metrics.failed.inc()
        return result

    def _decide(self, job: JobView, observed: Observed, settings: ChartSettings, now: datetime) -> ReconcilePlan:
        began = time.thread_time()
        plan = reconcile(job, observed, settings, now)
        self._metrics.decide_seconds.observe(time.thread_time() - began)
        return plan

    def _broker_is(self, said: Said | None) -> None:
        LOG.warning("%s", said.message) if said else LOG.info("NATS and Redis answer")
        self._cache.broker = said
        self._runs_changed()  # a restarted server is empty
        for key in self._cache.jobs():
            self._tell(key)


def restarted(cache: Cache) -> Iterator[Restarted]:
    """Yield the restart count of every worker, including those never restarted."""
    for namespace, name in cache.jobs():
        job = cache.job((namespace, name))
        restarts = job.status.get("restarts") or {} if job is not None else {}
        counts = restarts.get("byWorker") or {}
        for role, number in sorted({*map(worker_of, counts), *(pod.key for pod in cache.pods((namespace, name)))}):
            if role in names.ROLES:  # users with status rights can write any name
                yield Restarted(namespace, name, role, number, counts.get(worker_name((role, number)), 0))


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task, and raise its error if it had failed."""
    await ended(task)
    if not task.cancelled():
        task.result()

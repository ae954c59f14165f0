"""Setup and cleanup of the streams, users and keys of runs in NATS and Redis.

    cache.open_runs, live_runs -> Runs -> Streams, RedisUsers (a `Server` each, in a `Tending`)

One task per server reconciles it periodically, and whenever a run opens or ends. Finalizers are not needed, because
ended runs are recognized after downtime. A run is over if its job is gone or closed and no pod of it runs. The operator
must also have seen it live, or watch its whole namespace.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from rlhfspec.errors import LeadershipLost
from rlhfspec.messages.loop import workers_of
from rlhfspec.operator.looking.cache import Cache
from rlhfspec.runs.live.redis_client import words_of
from rlhfspec.runs.live.redis_users import ClusterRun
from rlhfspec.stage.tasks import ended, to_the_end

_GATHER_SECONDS = 0.2  # gathers changes into one pass
MOST_SEEN = 100_000  # runs remembered
LOG = logging.getLogger(__name__)


class ServerAway(Exception):
    """Raised when NATS or Redis is unreachable or refuses."""


@dataclass(frozen=True, slots=True)
class OpenRun:
    namespace: str
    job: str
    uid: str
    stages: frozenset[str]


class Runs:
    """Open, live and ended runs; `watched` returns the completely listed namespaces."""

    def __init__(self, cache: Cache, watched: Callable[[], set[str]], may_act: Callable[[], bool]) -> None:
        self._cache = cache
        self._watched = watched
        self._may_act = may_act
        self._seen: OrderedDict[str, None] = OrderedDict()

    def open(self) -> set[ClusterRun]:
        return {ClusterRun(namespace, uid) for namespace, uid in self._cache.open_runs()}

    def to_declare(self) -> list[OpenRun]:
        """Return the open runs of valid jobs, whose streams must exist."""
        return [
            OpenRun(view.namespace, view.name, uid, frozenset(workers_of(view.job)))
            for uid, view in self._cache.jobs_of_open_runs().items()
            if view.job is not None
        ]

    def live(self) -> set[str]:
        """Return the uids of live runs, and remember them."""
        live = self._cache.live_runs()
        for uid in live:
            self._seen[uid] = None
            self._seen.move_to_end(uid)
        while len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        return live

    def over(self, found: Iterable[ClusterRun]) -> set[ClusterRun]:
        """Return the runs of `found` that are over; list `found` from the server before this call."""
        live, watched = self.live(), self._watched()
        return {
            run for run in found if run.uid not in live and (run.namespace in watched or self._was_seen_to_end(run))
        }

    def _was_seen_to_end(self, run: ClusterRun) -> bool:
        """Return whether a run was seen live in a namespace that was always watched."""
        return run.uid in self._seen and run.namespace not in self._cache.left

    def check(self) -> None:
        if not self._may_act():
            raise LeadershipLost("the Lease is no longer held")


class Server(Protocol):
    name: str
    seconds: float  # between two passes

    async def settle(self, runs: Runs) -> None:
        """Create the server's resources for open runs and delete those of ended runs, or raise ServerAway."""

    async def close(self) -> None: ...


class Tending:
    """Task that keeps one server up to date and calls `failed` after an incomplete pass."""

    def __init__(self, server: Server, runs: Runs, failed: Callable[[str], None]) -> None:
        self._server = server
        self._runs = runs
        self._failed = failed
        self._told = asyncio.Event()
        self._problem = ""

    def tell(self) -> None:
        """Start a pass because a run opened or ended."""
        self._told.set()

    async def run(self) -> None:
        looking = asyncio.create_task(self._keep_looking())
        try:
            await asyncio.wait([looking])
            looking.result()
        finally:
            await to_the_end(self._over(looking))

    async def _over(self, looking: asyncio.Task[None]) -> None:
        await ended(looking)
        await self._server.close()

    async def _keep_looking(self) -> None:
        while True:
            self._told.clear()
            await self._look()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._server.seconds):
                    await self._told.wait()
                    await asyncio.sleep(_GATHER_SECONDS)

    async def _look(self) -> None:
        try:
            await self._server.settle(self._runs)
        except LeadershipLost:
            return
        except ServerAway as error:
            self._is(words_of(error))
        except Exception as error:  # an unforeseen error must not stop the cleanup
            LOG.debug("%s", self._server.name, exc_info=error)
            self._is(f"{type(error).__name__}: {words_of(error)}")
        else:
            self._is("")

    def _is(self, problem: str) -> None:
        if problem:
            self._failed(self._server.name)
        if problem and problem != self._problem:
            LOG.warning(
                "%s: %s; open runs continue; until it is back, new runs wait and data of ended runs is not deleted",
                self._server.name,
                problem,
            )
        elif self._problem and not problem:
            LOG.info("%s: setup and cleanup of runs work again", self._server.name)
        self._problem = problem

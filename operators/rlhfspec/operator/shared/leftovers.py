"""What runs have in NATS and Redis, and leave there, set right beside the reconciles: streams, users, keys.

Each server has a task of its own, which looks at what is there, again and again, and at once when a run opens or is
over. It needs no memory and no finalizer of a job: a run that ended while the operator was away is seen to be over when
it is back. A server that is away or deaf delays no task but its own; one line of the log says so.

    cache.open_runs, live_runs -> Runs -> Streams, RedisUsers (a `Server` each, in a `Tending`)

A run is over where its job is gone or says so, none of its pods runs, and the operator can know: it has seen the run
live before, or watches all that there is in its namespace.
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

_GATHER_SECONDS = 0.2  # what happens meanwhile is one look
MOST_SEEN = 100_000  # runs that are remembered
LOG = logging.getLogger(__name__)


class ServerAway(Exception):
    """NATS or Redis cannot be asked now, or refuses; the words say why."""


@dataclass(frozen=True, slots=True)
class OpenRun:
    """As much of it as its subjects derive from (`loop.declarations`)."""

    namespace: str
    job: str
    uid: str
    stages: frozenset[str]


class Runs:
    """`watched`: namespaces of which all is known now. `may_act`: whether we still lead; asked before everything that
    is written or taken away."""

    def __init__(self, cache: Cache, watched: Callable[[], set[str]], may_act: Callable[[], bool]) -> None:
        self._cache = cache
        self._watched = watched
        self._may_act = may_act
        self._seen: OrderedDict[str, None] = OrderedDict()

    def open(self) -> set[ClusterRun]:
        return {ClusterRun(namespace, uid) for namespace, uid in self._cache.open_runs()}

    def to_declare(self) -> list[OpenRun]:
        """Of those that are open, all whose job can be read."""
        return [
            OpenRun(view.namespace, view.name, uid, frozenset(workers_of(view.job)))
            for uid, view in self._cache.jobs_of_open_runs().items()
            if view.job is not None
        ]

    def live(self) -> set[str]:
        """By uid: what is of these is left alone."""
        live = self._cache.live_runs()
        for uid in live:
            self._seen[uid] = None
            self._seen.move_to_end(uid)
        while len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        return live

    def over(self, found: Iterable[ClusterRun]) -> set[ClusterRun]:
        """Of those that were found on a server before this is asked."""
        live, watched = self.live(), self._watched()
        return {
            run for run in found if run.uid not in live and (run.namespace in watched or self._was_seen_to_end(run))
        }

    def _was_seen_to_end(self, run: ClusterRun) -> bool:
        """It was live, and is no more, though the namespace is one that we would still see it in."""
        return run.uid in self._seen and run.namespace not in self._cache.left

    def check(self) -> None:
        if not self._may_act():
            raise LeadershipLost("the Lease is no longer held")


class Server(Protocol):
    name: str
    seconds: float  # between two looks

    async def settle(self, runs: Runs) -> None:
        """Makes what open runs need, takes away what others left. Raises ServerAway; whatever was done by then stands,
        and the next look goes on."""

    async def close(self) -> None: ...


class Tending:
    """`failed`: told of each look that was not finished."""

    def __init__(self, server: Server, runs: Runs, failed: Callable[[str], None]) -> None:
        self._server = server
        self._runs = runs
        self._failed = failed
        self._told = asyncio.Event()
        self._problem = ""

    def tell(self) -> None:
        """A run opened, or is over."""
        self._told.set()

    async def run(self) -> None:
        """Until it is cancelled."""
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
        except Exception as error:  # what was not foreseen here is no reason to look after no job
            LOG.debug("%s", self._server.name, exc_info=error)
            self._is(f"{type(error).__name__}: {words_of(error)}")
        else:
            self._is("")

    def _is(self, problem: str) -> None:
        if problem:
            self._failed(self._server.name)
        if problem and problem != self._problem:
            LOG.warning(
                "%s: %s; jobs go on, but until it is back a run that opens waits, and what others left there stays",
                self._server.name,
                problem,
            )
        elif self._problem and not problem:
            LOG.info("%s: what runs have there is looked after again", self._server.name)
        self._problem = problem

"""The feeds of all jobs that somebody looks at: one a job, however many browsers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rlhfspec.dashboard.jobs.source import JobKey, JobSource
from rlhfspec.dashboard.live.feed import Feed

LINGER_SECONDS = 60.0  # after the last has gone: one that only reloads the page comes back to the same feed


@dataclass(slots=True)
class _Used:
    starting: asyncio.Task[Feed]
    num_users: int = 0
    ending: asyncio.TimerHandle | None = None


class Feeds:
    def __init__(self, source: JobSource, *, linger_seconds: float = LINGER_SECONDS) -> None:
        self._source = source
        self._linger_seconds = linger_seconds
        self._feeds: dict[JobKey, _Used] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def keys(self) -> list[JobKey]:
        return list(self._feeds)

    @asynccontextmanager
    async def of(self, key: JobKey) -> AsyncIterator[Feed]:
        """Raises what the source says of a job that is not there."""
        used = self._feeds.get(key)
        if used is None:
            used = self._feeds[key] = _Used(asyncio.create_task(self._started(key)))
        if used.ending is not None:
            used.ending.cancel()
            used.ending = None
        used.num_users += 1
        try:
            yield await asyncio.shield(used.starting)
        finally:
            used.num_users -= 1
            if used.num_users == 0:
                self._end_later(key, used)

    async def _started(self, key: JobKey) -> Feed:
        feed, started = Feed(key, self._source), False
        try:
            await feed.start()
            started = True
        finally:
            if not started:
                self._feeds.pop(key, None)
                await feed.close()
        return feed

    def _end_later(self, key: JobKey, used: _Used) -> None:
        if self._feeds.get(key) is used:
            loop = asyncio.get_running_loop()
            used.ending = loop.call_later(self._linger_seconds, self._end, key, used)

    def _end(self, key: JobKey, used: _Used) -> None:
        if used.num_users == 0 and self._feeds.get(key) is used:
            del self._feeds[key]
            task = asyncio.create_task(used.starting.result().close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for key, used in list(self._feeds.items()):
            del self._feeds[key]
            if used.ending is not None:
                used.ending.cancel()
            if used.starting.done() and not used.starting.exception():
                await used.starting.result().close()
            else:
                used.starting.cancel()
        await asyncio.gather(*self._closing)

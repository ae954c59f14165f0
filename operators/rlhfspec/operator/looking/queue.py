"""Work queue of jobs: namespaces in turn, one reconcile per job at a time, exponential backoff."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

Key = tuple[str, str]  # namespace, name
GATHER_SECONDS = 0.05  # gathers simultaneous events into one reconcile
PATIENT_SECONDS = 0.25  # a slower reconcile (a slow webhook) continues while the worker takes the next job
REST_SECONDS = 0.5  # after a reconcile with nothing to do
LOG = logging.getLogger(__name__)
FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 0.5, 60.0


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """Result of a reconcile; `did` identifies its actions and is None if there were none."""

    requeue_seconds: float | None = None
    did: object = None
    failed: bool = False
    gone: bool = False


class Timers(Protocol):
    """Part of an event loop that the queue needs."""

    def time(self) -> float: ...
    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle: ...


@dataclass(slots=True)
class _Entry:
    is_reconciling: bool = False
    is_told: bool = False
    due: float | None = None
    not_before: float = 0.0
    backoff_seconds: float = 0.0
    last: object = None


class WorkQueue:
    """Queue of jobs to reconcile; `waited` receives the seconds that each reconcile was late."""

    def __init__(
        self,
        reconcile: Callable[[Key], Awaitable[ReconcileResult]],
        timers: Timers,
        *,
        waited: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._reconcile = reconcile
        self._waited = waited
        self._timers = timers
        self._entries: dict[Key, _Entry] = {}
        self._ready: dict[str, deque[Key]] = {}  # by namespace, in turn order
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return sum(map(len, self._ready.values()))

    def tell(self, key: Key, *, after_seconds: float = GATHER_SECONDS) -> None:
        """Schedule a reconcile of a job that changed."""
        entry = self._entries.setdefault(key, _Entry())
        if entry.is_reconciling:
            entry.is_told = True
        else:
            self._plan(key, entry, self._timers.time() + after_seconds)

    def _plan(self, key: Key, entry: _Entry, when: float) -> None:
        when = max(when, entry.not_before)
        if entry.due is None or when < entry.due:
            entry.due = when
            self._timers.call_at(when, lambda: self._fall_due(key, when))

    def _fall_due(self, key: Key, when: float) -> None:
        entry = self._entries.get(key)
        waiting = self._ready.get(key[0], ())
        if entry is not None and entry.due == when and not entry.is_reconciling and key not in waiting:
            self._ready.setdefault(key[0], deque()).append(key)
            self._arrived.set()

    def _next(self) -> Key:
        """Pop the next job, taking namespaces in turn."""
        namespace = next(iter(self._ready))
        waiting = self._ready.pop(namespace)
        key = waiting.popleft()
        if waiting:
            self._ready[namespace] = waiting
        return key

    async def work(self) -> None:
        """Run reconciles until cancelled; several tasks may do so concurrently."""
        async with asyncio.TaskGroup() as running:
            while True:
                while not self._ready:
                    self._arrived.clear()
                    await self._arrived.wait()
                key = self._next()
                entry = self._entries[key]
                assert entry.due is not None
                self._waited(self._timers.time() - entry.due)
                entry.is_reconciling, entry.is_told, entry.due = True, False, None
                reconciling = running.create_task(self._reconcile_one(key, entry))
                await asyncio.wait({reconciling}, timeout=PATIENT_SECONDS)

    async def _reconcile_one(self, key: Key, entry: _Entry) -> None:
        result = ReconcileResult(failed=True)
        try:
            result = await self._reconcile(key)
        except Exception:  # one job must not stop the others
            LOG.exception("reconciling %s failed", "/".join(key))
        finally:
            self._finished(key, entry, result)

    def _finished(self, key: Key, entry: _Entry, result: ReconcileResult) -> None:
        entry.is_reconciling = False
        if result.gone and not entry.is_told:
            del self._entries[key]
            return
        now = self._timers.time()
        repeats = result.failed or (result.did is not None and result.did == entry.last)
        entry.backoff_seconds = (
            min(max(2 * entry.backoff_seconds, FIRST_BACKOFF_SECONDS), LONGEST_BACKOFF_SECONDS) if repeats else 0.0
        )
        entry.not_before = now + max(entry.backoff_seconds, REST_SECONDS if result.did is None else 0.0)
        entry.last = result.did
        if entry.is_told or result.failed:
            self._plan(key, entry, now + GATHER_SECONDS)
        if result.requeue_seconds is not None:
            self._plan(key, entry, now + result.requeue_seconds)

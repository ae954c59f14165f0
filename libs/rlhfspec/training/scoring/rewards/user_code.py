"""User code runs in daemon threads: a function that never returns may be left behind and keeps no process alive.

What it returns or raises comes back as a value, so that no exception of a user's is ever lost or unwinds our own code.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

PING_SECONDS = 0.1  # part of a call's deadline
_IDLE_SECONDS = 1.0  # so long a thread waits for another call: starting one costs more than most rewards


@dataclass(frozen=True, slots=True)
class CallResult:
    """What became of a call: `error` when it raised, else `value`."""

    value: Any = None
    error: BaseException | None = None


_Jobs = queue.SimpleQueue[tuple[Callable[[], object], Future[CallResult]]]
_idle: list[_Jobs] = []  # of threads that have nothing to do; the last to become idle is the first to be used
_idle_lock = threading.Lock()


def in_daemon_thread(function: Callable[[], object]) -> Future[CallResult]:
    """Starts at once, in a thread that does nothing else: one that hangs is used for no other call.

    Example:
        >>> in_daemon_thread(lambda: 6 * 7).result(timeout=10.0)
        CallResult(value=42, error=None)
        >>> in_daemon_thread(lambda: int("x")).result(timeout=10.0).error
        ValueError("invalid literal for int() with base 10: 'x'")
    """
    future: Future[CallResult] = Future()
    future.set_running_or_notify_cancel()  # a caller that gives up cannot cancel it, and the thread may still end it
    with _idle_lock:
        jobs = _idle.pop() if _idle else None
    if jobs is None:
        jobs = queue.SimpleQueue()
        threading.Thread(target=_work, args=(jobs,), name="reward", daemon=True).start()
    jobs.put((function, future))
    return future


def _work(jobs: _Jobs) -> None:
    while (job := _next(jobs)) is not None:
        function, future = job
        try:
            outcome = CallResult(function())
        except BaseException as error:
            outcome = CallResult(error=error)
        with _idle_lock:
            _idle.append(jobs)
        future.set_result(outcome)
        del job, function, future, outcome  # hold neither arguments nor result while waiting for the next


def _next(jobs: _Jobs) -> tuple[Callable[[], object], Future[CallResult]] | None:
    """None: nobody needs this thread any more."""
    try:
        return jobs.get(timeout=_IDLE_SECONDS)
    except queue.Empty:
        with _idle_lock:
            if jobs in _idle:
                _idle.remove(jobs)
                return None
        return jobs.get()  # taken from the list a moment ago: the call is on its way


class LoopThread:
    """One event loop in a daemon thread, for async user code: what it keeps between calls (a client) stays usable."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gave_up = False

    async def outcome(self, start: Callable[[], Awaitable[object]]) -> CallResult:
        loop = await self._responsive_loop()
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_outcome(start), loop))
        except asyncio.CancelledError:
            self._gave_up = True
            raise

    async def _responsive_loop(self) -> asyncio.AbstractEventLoop:
        """The loop there is, unless a call that never awaits has blocked it."""
        if self._loop is not None and self._gave_up and not await _answers(self._loop):
            await self.close()
        self._gave_up = False
        if self._loop is None:
            runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
            self._loop = runner.get_loop()
            threading.Thread(target=_serve, args=(runner,), name="reward-loop", daemon=True).start()
        return self._loop

    async def close(self) -> None:
        """The loop ends as soon as it may; nobody waits for a call that blocks it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


def _serve(runner: asyncio.Runner) -> None:
    with runner:  # at its end it cancels what is left and closes the loop
        runner.get_loop().run_forever()


async def _outcome(start: Callable[[], Awaitable[object]]) -> CallResult:
    try:
        return CallResult(await start())
    except BaseException as error:  # SystemExit would end the loop of every other call
        return CallResult(error=error)


async def _answers(loop: asyncio.AbstractEventLoop) -> bool:
    ping = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_nothing(), loop))
    done, _ = await asyncio.wait({ping}, timeout=PING_SECONDS)
    return bool(done)


def _nothing() -> Coroutine[Any, Any, None]:
    return asyncio.sleep(0)

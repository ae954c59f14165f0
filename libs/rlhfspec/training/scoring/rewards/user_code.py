"""User code in daemon threads, which keep no process alive. Exceptions become values."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

PING_SECONDS = 0.1  # part of a call's deadline
_IDLE_THREAD_SECONDS = 1.0  # before an idle thread ends; starting one costs more than most rewards


@dataclass(frozen=True, slots=True)
class CallResult:
    value: Any = None
    error: BaseException | None = None


_Jobs = queue.SimpleQueue[tuple[Callable[[], object], Future[CallResult]]]
_idle: list[_Jobs] = []  # of idle threads; the last used is taken first
_idle_lock = threading.Lock()


def in_daemon_thread(function: Callable[[], object]) -> Future[CallResult]:
    """Run the function at once in a daemon thread of its own."""
    future: Future[CallResult] = Future()
    future.set_running_or_notify_cancel()  # the caller cannot cancel it, so the thread may set its result
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
    try:
        return jobs.get(timeout=_IDLE_THREAD_SECONDS)
    except queue.Empty:
        with _idle_lock:
            if jobs in _idle:
                _idle.remove(jobs)
                return None
        return jobs.get()  # removed from the list meanwhile: the call is on its way


class LoopThread:
    """Event loop in a daemon thread for async user code, kept between calls."""

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
        """Return the current loop, or a new one if a blocking call holds it."""
        if self._loop is not None and self._gave_up and not await _answers(self._loop):
            await self.close()
        self._gave_up = False
        if self._loop is None:
            runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
            self._loop = runner.get_loop()
            threading.Thread(target=_serve, args=(runner,), name="reward-loop", daemon=True).start()
        return self._loop

    async def close(self) -> None:
        """Stop the loop without waiting for a call that blocks it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


def _serve(runner: asyncio.Runner) -> None:
    with runner:  # cancels the remaining tasks and closes the loop
        runner.get_loop().run_forever()


async def _outcome(start: Callable[[], Awaitable[object]]) -> CallResult:
    try:
        return CallResult(await start())
    except BaseException as error:  # SystemExit would end the loop of every other call
        return CallResult(error=error)


async def _answers(loop: asyncio.AbstractEventLoop) -> bool:
    ping = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop))
    done, _ = await asyncio.wait({ping}, timeout=PING_SECONDS)
    return bool(done)

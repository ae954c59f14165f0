"""User code runs in daemon threads: a function that never returns may be left behind and keeps no process alive.

What it returns or raises comes back as a value, so that no exception of a user's is ever lost or unwinds our own code.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

PING_SECONDS = 0.1  # part of a call's deadline


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call: `error` when it raised, else `value`."""

    value: Any = None
    error: BaseException | None = None


def in_daemon_thread(function: Callable[[], object]) -> Future[Outcome]:
    """Starts at once; a thread of its own, since a pool's thread that hangs would take the next call with it.

    Example:
        >>> in_daemon_thread(lambda: 6 * 7).result(timeout=10.0)
        Outcome(value=42, error=None)
        >>> in_daemon_thread(lambda: int("x")).result(timeout=10.0).error
        ValueError("invalid literal for int() with base 10: 'x'")
    """
    future: Future[Outcome] = Future()
    future.set_running_or_notify_cancel()  # a caller that gives up cannot cancel it, and the thread may still end it

    def run() -> None:
        try:
            outcome = Outcome(function())
        except BaseException as error:
            outcome = Outcome(error=error)
        future.set_result(outcome)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return future


class LoopThread:
    """One event loop in a daemon thread, for async user code: what it keeps between calls (a client) stays usable."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gave_up = False

    async def outcome(self, start: Callable[[], Awaitable[object]]) -> Outcome:
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


async def _outcome(start: Callable[[], Awaitable[object]]) -> Outcome:
    try:
        return Outcome(await start())
    except BaseException as error:  # SystemExit would end the loop of every other call
        return Outcome(error=error)


async def _answers(loop: asyncio.AbstractEventLoop) -> bool:
    ping = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_nothing(), loop))
    done, _ = await asyncio.wait({ping}, timeout=PING_SECONDS)
    return bool(done)


def _nothing() -> Coroutine[Any, Any, None]:
    return asyncio.sleep(0)

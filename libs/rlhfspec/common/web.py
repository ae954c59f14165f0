"""Serving of an aiohttp application."""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from rlhfspec.errors import InvalidRequest

_END_SECONDS = 2.0  # for pending responses; streams end at once


@asynccontextmanager
async def serving(
    app: web.Application, host: str, port: int, *, tls: ssl.SSLContext | None = None, option: str = "--port"
) -> AsyncIterator[int]:
    """Serve inside the block, and yield the port; 0 picks a free one. `option`: its name in errors."""
    # A handler is cancelled as soon as its client leaves, not at its next write.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_END_SECONDS, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, ssl_context=tls)
        try:
            await site.start()
        except OSError as error:
            raise InvalidRequest(option, port, f"cannot listen on this port: {error.strerror}") from None
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def serve(
    app: web.Application, host: str, port: int, *, tls: ssl.SSLContext | None = None, ready: Callable[[int], None]
) -> None:
    """Serve until SIGINT or SIGTERM. `ready` gets the port."""
    async with serving(app, host, port, tls=tls) as at:
        ending = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ending.set)
        ready(at)
        await ending.wait()

"""Serving of an aiohttp application."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from rlhfspec.errors import InvalidRequest

_END_SECONDS = 2.0  # for pending responses; streams end at once


def listen(host: str, port: int, *, option: str = "--port") -> socket.socket:
    """Return a socket that accepts connections; port 0 picks a free one. `option`: its name in errors."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InvalidRequest(option, port, f"cannot listen on this port: {error.strerror}") from None


@asynccontextmanager
async def serving(
    app: web.Application, listening: socket.socket, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serve inside the block, and yield the port. The socket is closed at the end."""
    # A handler is cancelled as soon as its client leaves, not at its next write.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_END_SECONDS, handler_cancellation=True)
    try:
        await runner.setup()
        await web.SockSite(runner, listening, ssl_context=tls).start()
        yield listening.getsockname()[1]
    finally:
        await runner.cleanup()
        listening.close()


async def serve(
    app: web.Application, host: str, port: int, *, tls: ssl.SSLContext | None = None, ready: Callable[[int], None]
) -> None:
    """Serve until SIGINT or SIGTERM. `ready` gets the port."""
    async with serving(app, listen(host, port), tls=tls) as at:
        ending = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ending.set)
        ready(at)
        await ending.wait()

"""A dashboard on a port, until it is asked to end."""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import Callable

from aiohttp import web

from rlhfspec.dashboard.server import Dashboard
from rlhfspec.errors import InvalidRequest

END_SECONDS = 2.0  # for answers under way; streams end at once


async def serve(
    dashboard: Dashboard, host: str, port: int, *, tls: ssl.SSLContext | None = None, ready: Callable[[int], None]
) -> None:
    """Returns after SIGINT or SIGTERM. `port` 0: any; `ready` is told which. InvalidRequest where it is taken."""
    # A page that was closed gives its place back at once: without cancellation only the next beat would tell.
    runner = web.AppRunner(
        dashboard.app(), access_log=None, shutdown_timeout=END_SECONDS, handler_cancellation=True
    )  # fmt: skip
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, ssl_context=tls)
        try:
            await site.start()
        except OSError as error:
            raise InvalidRequest("--port", port, f"cannot be listened at: {error.strerror}") from None
        ending = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ending.set)
        ready(runner.addresses[0][1])
        await ending.wait()
    finally:
        await runner.cleanup()

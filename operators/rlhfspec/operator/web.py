"""HTTP server for probes and Prometheus, and HTTPS server for reports of jobs."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from rlhfspec.errors import InvalidRequest
from rlhfspec.operator.metrics import Metrics

_CERTIFICATE, KEY = "tls.crt", "tls.key"  # in the Secret RELEASE-operator-tls
_SHUTDOWN_SECONDS = 2.0


def health_app(metrics: Metrics, problem: Callable[[], str]) -> web.Application:
    """Return the app of `/healthz`, `/metrics` and `/readyz`, which answers 503 with the text of `problem`, if any."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text=f"{(said := problem()) or 'ok'}\n", status=503 if said else 200)

    async def counted(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", counted)])
    return app


def tls_of(folder: Path) -> ssl.SSLContext:
    """Return a TLS server context with the certificate and key in a folder."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(folder / _CERTIFICATE, folder / KEY)
    except (OSError, ssl.SSLError) as error:
        problem = f"{_CERTIFICATE} and {KEY} cannot be read: {error}"
        raise InvalidRequest("--tls", str(folder), problem) from None
    return context


@asynccontextmanager
async def served(app: web.Application, host: str, port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Serve an app inside the block and yield its port."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, ssl_context=tls)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()

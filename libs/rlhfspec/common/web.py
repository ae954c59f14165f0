"""Serving of an aiohttp application, and the files of pages."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from importlib.resources import files

from aiohttp import web

from rlhfspec.errors import InvalidRequest

_END_SECONDS = 2.0  # for pending responses; streams end at once
HEADERS = {  # of every answer to a browser
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
SHARED = {"base.css": "text/css", "icon.svg": "image/svg+xml"}


class StaticFiles:
    """Files in the folder `static` of a package, and those that all pages share. `kinds`: content types by name."""

    def __init__(self, package: str, kinds: Mapping[str, str]) -> None:
        places = dict.fromkeys(SHARED, "rlhfspec.common") | dict.fromkeys(kinds, package)
        self._kinds = {**SHARED, **kinds}
        self._contents = {name: files(place).joinpath("static", name).read_bytes() for name, place in places.items()}

    def answer(self, request: web.Request, name: str) -> web.Response:
        """Return a file, or 304 if the browser has it. Raise HTTPNotFound for another name."""
        if name not in self._contents:
            raise web.HTTPNotFound(text="no such file")
        return tagged(request, self._contents[name], self._kinds[name])


def tagged(request: web.Request, body: bytes, kind: str) -> web.Response:
    """Return the body, of content type `kind`, with an ETag, or 304 if the browser has it."""
    tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache", "Vary": "Cookie, Authorization"}
    if request.headers.get("If-None-Match") == tag:
        return web.Response(status=304, headers=headers)
    answer = web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)
    if len(body) > 1024:
        answer.enable_compression()
    return answer


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

"""Answers that a client gets again when it sends a request again with the same `Idempotency-Key`."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

from rlhfspec.errors import InvalidRequest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
IDEMPOTENCY_KEY = "Idempotency-Key"
STREAM_END = b"data: [DONE]\n\n"  # the last bytes of a stream that is whole
_LONGEST_KEY = 255
_SECONDS = 600.0  # from the first request
_MOST_KEYS = 1024
_MOST_BYTES = 64 << 20


class KeptStream(web.StreamResponse):
    """Stream of events, which remembers what it sent to a request with a key."""

    def __init__(self, request: web.Request) -> None:
        super().__init__(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        self._keeps = IDEMPOTENCY_KEY in request.headers
        self.sent = bytearray()

    async def write(self, data: bytes) -> None:  # type: ignore[override]
        if self._keeps:
            self.sent += data
        await super().write(data)


@dataclass(slots=True)
class _Request:
    digest: bytes
    began: float = field(default_factory=time.monotonic)
    running: asyncio.Lock = field(default_factory=asyncio.Lock)
    answer: bytes | None = None
    kind: str = ""  # content type of the answer


class Retries:
    """Memory of the requests with a key. Only whole answers are kept: what failed or was left runs again."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, _Request] = OrderedDict()  # the oldest first

    def once(self, handler: Handler) -> Handler:
        """Return a handler that answers a request with a known key as the first time, without running again."""

        async def handle(request: web.Request) -> web.StreamResponse:
            key = request.headers.get(IDEMPOTENCY_KEY)
            if key is None:
                return await handler(request)
            known = self._known(key, hashlib.blake2b(request.path.encode() + await request.read()).digest())
            async with known.running:  # a second try waits for the first
                if known.answer is not None:
                    return web.Response(body=known.answer, headers={"Content-Type": known.kind})
                try:
                    response = await handler(request)
                except (InvalidRequest, web.HTTPException):  # nothing ran: the key is free
                    self._requests.pop(key, None)
                    raise
                if isinstance(response, KeptStream):
                    known.answer = bytes(response.sent) if response.sent.endswith(STREAM_END) else None
                elif isinstance(response, web.Response) and isinstance(response.body, bytes):
                    known.answer = response.body
                known.kind = response.headers["Content-Type"]
                return response

        return handle

    def _known(self, key: str, digest: bytes) -> _Request:
        if not 0 < len(key) <= _LONGEST_KEY:
            raise InvalidRequest(IDEMPOTENCY_KEY, f"{len(key)} characters", f"must have 1 to {_LONGEST_KEY} characters")
        self._forget()
        known = self._requests.setdefault(key, _Request(digest))
        if known.digest != digest:
            problem = f"{IDEMPOTENCY_KEY}: {key!r} belongs to a request with another body"
            raise web.HTTPConflict(text=problem, headers={"x-should-retry": "false"})
        return known

    def _forget(self) -> None:
        """Forget the oldest requests until the others are recent, few and small."""
        num_bytes = sum(len(each.answer or b"") for each in self._requests.values())
        for key, oldest in list(self._requests.items()):
            is_recent = time.monotonic() - oldest.began < _SECONDS
            if is_recent and len(self._requests) < _MOST_KEYS and num_bytes < _MOST_BYTES:
                return
            num_bytes -= len(oldest.answer or b"")
            del self._requests[key]

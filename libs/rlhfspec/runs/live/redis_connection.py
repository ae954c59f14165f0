"""A connection to Redis by TLS that is over as soon as it is closed, whatever is cancelled meanwhile."""

from __future__ import annotations

from typing import Any

from redis.asyncio.connection import SSLConnection

from rlhfspec.stage.tasks import to_the_end


class PromptlyClosed(SSLConnection):
    """Close at once. asyncio closes a socket under TLS when the other side has said goodbye too, and the client waits
    for that only where nothing failed and nothing was cancelled: an event loop that ends before it leaves the socket
    open."""

    async def _connect(self) -> None:
        await to_the_end(super()._connect())  # type: ignore[no-untyped-call]  # it has a timeout

    async def disconnect(self, *arguments: Any, **options: Any) -> None:
        writer = self._writer
        try:
            await super().disconnect(*arguments, **options)
        finally:
            if writer is not None:
                writer.transport.abort()

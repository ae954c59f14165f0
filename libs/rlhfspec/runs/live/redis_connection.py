"""TLS connection to Redis that closes at once, even if cancelled."""

from __future__ import annotations

from typing import Any

from redis.asyncio.connection import SSLConnection

from rlhfspec.stage.tasks import to_the_end


class PromptlyClosed(SSLConnection):
    """TLS connection that, unlike asyncio's, closes without the peer's close_notify."""

    async def _connect(self) -> None:
        await to_the_end(super()._connect())  # type: ignore[no-untyped-call]  # it has a timeout

    async def disconnect(self, *arguments: Any, **options: Any) -> None:
        writer = self._writer
        try:
            await super().disconnect(*arguments, **options)
        finally:
            if writer is not None:
                writer.transport.abort()

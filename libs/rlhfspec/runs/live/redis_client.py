"""Redis client with the credentials of a role."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfspec.errors import InvalidRequest
from rlhfspec.messages.servers.credentials.certificates import SERVERS_AUTHORITY
from rlhfspec.runs.live.redis_users import PASSWORD_FILE, USER_FILE
from rlhfspec.stage.tasks import to_the_end

if TYPE_CHECKING:
    from redis.asyncio import Redis

Connected = Callable[[Any], Awaitable[None]]  # called with each new connection
_SCHEMES = ("unix", "redis", "rediss")
_REDIS_CLOSE_SECONDS = 0.2


def client_of(url: str, credentials: Path | None, timeout_seconds: float, connected: Connected | None = None) -> Redis:
    """Return a client with the run's credentials; `connected` replaces `on_connect`."""
    if url.partition("://")[0] not in _SCHEMES:
        raise InvalidRequest("redis_url", url, f"must begin with one of {', '.join(f'{each}://' for each in _SCHEMES)}")
    options = {} if credentials is None else _options_of(url, credentials)
    return client(url, timeout_seconds, options, connected)


def client(url: str, timeout_seconds: float, options: dict[str, Any], connected: Connected | None = None) -> Redis:
    """Return a Redis client without retries; `connected` is called on connecting."""
    from redis.asyncio import ConnectionPool, Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    from rlhfspec.runs.live.redis_connection import PromptlyClosed

    pool = ConnectionPool.from_url(
        url, socket_timeout=timeout_seconds, socket_connect_timeout=timeout_seconds, protocol=2,
        retry=Retry(NoBackoff(), 0), redis_connect_func=connected, **options,
    )  # fmt: skip
    if url.startswith("rediss:"):
        pool.connection_class = PromptlyClosed
    return Redis.from_pool(pool)


def _options_of(url: str, credentials: Path) -> dict[str, Any]:
    """Return client options: the password and, for a cluster's server, user and certificate authority."""
    options: dict[str, Any] = {"password": _text_in(credentials / PASSWORD_FILE)}
    if (credentials / USER_FILE).exists():
        options["username"] = _text_in(credentials / USER_FILE)
    if url.startswith("rediss:"):
        options["ssl_ca_certs"] = str(credentials / SERVERS_AUTHORITY)
    return options


def _text_in(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise InvalidRequest("credentials", str(path), f"cannot be read: {error.strerror}") from None


async def close(redis: Redis) -> None:
    """Close the client and its connection, even if cancelled."""
    await to_the_end(_try_to_close(redis))


async def _try_to_close(redis: Redis) -> None:
    with suppress(*failures()):
        async with asyncio.timeout(_REDIS_CLOSE_SECONDS):
            await redis.aclose()


def failures() -> tuple[type[Exception], ...]:
    from redis.exceptions import RedisError

    return (RedisError, OSError, TimeoutError)


def words_of(error: Exception) -> str:
    r"""Return the error in one line that is never empty.

    >>> words_of(TimeoutError()), words_of(OSError("no\n  route"))
    ('no answer in time', 'no route')
    """
    text = " ".join(str(error).split())
    return text or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)

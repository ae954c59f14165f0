"""Reachability checks of NATS and Redis; two failed dials in a row count as down."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from urllib.parse import urlsplit

from rlhfspec.cluster import names
from rlhfspec.operator.deciding.observed import Said

DIAL_SECONDS, DIAL_AGAIN_SECONDS = 3.0, 1.0
_SERVER_ANSWER_SECONDS = 10.0  # a server on a busy node may be slow
MOST_MISSED = 2
_DEFAULT_PORTS = {
    "nats": names.NATS_PORT,
    "tls": names.NATS_PORT,
    "redis": names.REDIS_PORT,
    "rediss": names.REDIS_PORT,
}
LOG = logging.getLogger(__name__)


class Dialling:
    def __init__(self, urls: dict[str, str], told: Callable[[Said | None], None]) -> None:
        """Create a dialler of `urls`, keyed by server name; `told` receives each new problem, or None."""
        self._urls = urls
        self._told = told
        self._missed = dict.fromkeys(urls, 0)
        self._last: Said | None = None

    async def run(self, is_wanted: Callable[[], bool]) -> None:
        while True:
            if is_wanted():
                await self.dial()
            await asyncio.sleep(DIAL_AGAIN_SECONDS if self._is_in_doubt else DIAL_SECONDS)

    @property
    def _is_in_doubt(self) -> bool:
        return any(0 < missed < MOST_MISSED for missed in self._missed.values())

    async def dial(self) -> None:
        problems = await asyncio.gather(*(_problem_of(url) for url in self._urls.values()))
        for name, problem in zip(self._urls, problems, strict=True):
            self._missed[name] = self._missed[name] + 1 if problem else 0
        named = zip(self._urls.items(), problems, strict=True)
        down = [f"{name} at {_shown(url)}: {said}" for (name, url), said in named if self._missed[name] >= MOST_MISSED]
        if self._is_in_doubt:
            return
        now = Said("BrokerUnavailable", "; ".join(down)) if down else None
        if now != self._last:
            self._last = now
            self._told(now)


async def _problem_of(url: str) -> str:
    """Return why a server does not answer, or an empty text."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(_SERVER_ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or _DEFAULT_PORTS[parts.scheme])
            try:
                is_nats = parts.scheme in ("nats", "tls")  # which sends INFO first, even before TLS
                return "" if not is_nats or (await reader.readline()).startswith(b"INFO ") else "not a NATS server"
            finally:
                writer.close()
    except TimeoutError:
        return f"no answer within {_SERVER_ANSWER_SECONDS:.0f} s"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)


def _shown(url: str) -> str:
    """Return host and port of a URL, without credentials."""
    return urlsplit(url).netloc.rpartition("@")[2]

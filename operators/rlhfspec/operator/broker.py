"""NATS and Redis, seen from outside: can they be reached (`Observed.broker`), and the end of a run's streams.

Dialled every DIAL_SECONDS while there are jobs, as `told` when the answer changed; one missed dial says nothing, but
the next comes soon.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import nats
import nats.errors
from nats.aio.client import Client, RawCredentials

from rlhfspec.cluster import names
from rlhfspec.operator.observed import Said
from rlhfspec.transport.nats_streams import stream_name

DIAL_SECONDS, DIAL_AGAIN_SECONDS, ANSWER_SECONDS = 3.0, 1.0, 2.0
MOST_MISSED = 2
CALL_SECONDS = 5.0
_DEFAULT_PORTS = {
    "nats": names.NATS_PORT,
    "tls": names.NATS_PORT,
    "redis": names.REDIS_PORT,
    "rediss": names.REDIS_PORT,
}
LOG = logging.getLogger(__name__)


class Dialling:
    def __init__(self, urls: dict[str, str], told: Callable[[Said | None], None]) -> None:
        """`urls`: by what a user calls the server."""
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
    """Empty: somebody answers. NATS speaks first, whether it wants TLS or not."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or _DEFAULT_PORTS[parts.scheme])
            try:
                is_nats = parts.scheme in ("nats", "tls")
                return "" if not is_nats or (await reader.readline()).startswith(b"INFO ") else "no NATS server there"
            finally:
                writer.close()
    except TimeoutError:
        return f"no answer within {ANSWER_SECONDS:.0f} s"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)


def _shown(url: str) -> str:
    """Without a password that may stand in it."""
    return urlsplit(url).netloc.rpartition("@")[2]


class Purge:
    """Deletes the streams of a run. `creds`: of a user who may (`service.credentials.operator_creds`)."""

    def __init__(self, url: str, creds: bytes | None, inbox: str, tls: ssl.SSLContext | None) -> None:
        options: dict[str, Any] = {"tls": tls} if tls is not None else {}
        if creds is not None:
            options |= {"user_credentials": RawCredentials(creds.decode()), "inbox_prefix": inbox}
        self._url = url
        self._options = options
        self._one_at_a_time = asyncio.Lock()

    async def __call__(self, job: str, run: str) -> bool:
        """Whether they are gone; False: later, perhaps."""
        try:
            async with self._one_at_a_time, asyncio.timeout(4 * CALL_SECONDS):
                await self._delete(f"{stream_name(f'rlhf.{job}.{run}')}_")
        except (OSError, TimeoutError, nats.errors.Error) as error:
            LOG.warning("streams of run %s of %s cannot be deleted: %s %s", run, job, type(error).__name__, error)
            return False
        return True

    async def _delete(self, prefix: str) -> None:
        client = await nats.connect(
            self._url, connect_timeout=int(CALL_SECONDS), allow_reconnect=False, error_cb=_quiet, **self._options
        )
        try:
            names_, total = list[str](), 1
            while len(names_) < total:
                page = await self._call(client, "NAMES", {"offset": len(names_)})
                total = page["total"]
                if not page["streams"]:
                    break
                names_ += page["streams"]
            for name in names_:
                if name.startswith(prefix):
                    await self._call(client, f"DELETE.{name}", {})
        finally:
            await client.close()

    async def _call(self, client: Client, what: str, asked: dict[str, Any]) -> dict[str, Any]:
        answer = await client.request(f"$JS.API.STREAM.{what}", json.dumps(asked).encode(), timeout=CALL_SECONDS)
        said: dict[str, Any] = json.loads(answer.data)
        if "error" in said and said["error"].get("code") != 404:
            raise nats.errors.Error(f"{what}: {said['error'].get('description')}")
        return said


async def _quiet(_: Exception) -> None:
    """What goes wrong is raised where it was asked."""

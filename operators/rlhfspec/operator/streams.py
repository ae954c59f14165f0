"""Streams in NATS of runs that are over. A stream says in its metadata of which install and namespace it is, so that
several may share one server; one that says nothing is somebody else's.

Example:
    >>> metadata_of("6eb63d927a08", "team")
    {'rlhfspec.install': '6eb63d927a08', 'rlhfspec.namespace': 'team'}
    >>> run_in("rlhf_sums_3f2a1b9c_sample"), run_in("EVENTS")
    ('3f2a1b9c', '')
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import nats.errors
from nats.aio.client import Client, RawCredentials

from rlhfspec.operator.leftovers import Runs, ServerAway
from rlhfspec.service.redis_client import words_of
from rlhfspec.service.redis_users import ClusterRun
from rlhfspec.service.tasks import to_the_end

LOOK_SECONDS = 15.0
CALL_SECONDS = 2.0  # for one answer
CLOSE_SECONDS = 0.5
SWEEP_SECONDS = 60.0  # for all of them
_INSTALL, _NAMESPACE = "rlhfspec.install", "rlhfspec.namespace"


def metadata_of(install: str, namespace: str) -> dict[str, str]:
    return {_INSTALL: install, _NAMESPACE: namespace}


def run_in(stream: str) -> str:
    """The run's uid, by which all streams of a run are called; empty: it is no stream of a run."""
    words = stream.split("_")
    return words[-2] if words[0] == "rlhf" and len(words) >= 4 else ""


class Streams:
    """`creds`: of a user who may find and delete them (`service.credentials.operator_creds`)."""

    name, seconds = "NATS", LOOK_SECONDS

    def __init__(self, url: str, install: str, creds: bytes | None, inbox: str, tls: ssl.SSLContext | None) -> None:
        options: dict[str, Any] = {"tls": tls} if tls is not None else {}
        if creds is not None:
            options |= {"user_credentials": RawCredentials(creds.decode()), "inbox_prefix": inbox.encode()}
        self._url = url
        self._install = install
        self._options = options
        self._of_others: set[str] = set()  # streams that were asked whose they are; that never changes

    async def settle(self, runs: Runs) -> None:
        client = Client()
        try:
            async with asyncio.timeout(SWEEP_SECONDS):
                await self._connect(client)
                await self._sweep(client, runs)
        except (OSError, TimeoutError, nats.errors.Error) as error:
            raise ServerAway(words_of(error)) from error
        finally:
            await to_the_end(_closed(client))

    async def close(self) -> None:
        """Each look has a connection of its own."""

    async def _connect(self, client: Client) -> None:
        async with asyncio.timeout(2 * CALL_SECONDS):
            await client.connect(self._url, name="operator", allow_reconnect=False, error_cb=_quiet, **self._options)

    async def _sweep(self, client: Client, runs: Runs) -> None:
        """Names are listed first: a run that opens meanwhile is not among them."""
        names = await self._names(client)
        self._of_others &= names
        live = runs.live()
        left = sorted(name for name in names - self._of_others if (uid := run_in(name)) and uid not in live)
        owners = {name: owner for name in left if (owner := await self._owner(client, name)) is not None}
        over = runs.over(owners.values())
        for name, owner in owners.items():
            if owner in over:
                runs.check()
                await _call(client, f"DELETE.{name}", {})

    async def _names(self, client: Client) -> set[str]:
        names, offset, total = set[str](), 0, 1
        while offset < total:
            page = await _call(client, "NAMES", {"offset": offset})
            found, total = page.get("streams") or [], page.get("total", 0)
            if not found:
                break
            names.update(found)
            offset += len(found)
        return names

    async def _owner(self, client: Client, name: str) -> ClusterRun | None:
        info = await _call(client, f"INFO.{name}", {})
        if "config" not in info:  # it is gone meanwhile
            return None
        metadata: Mapping[str, str] = info["config"].get("metadata") or {}
        if metadata.get(_INSTALL) != self._install:
            self._of_others.add(name)
            return None
        return ClusterRun(metadata.get(_NAMESPACE, ""), run_in(name))


async def _call(client: Client, what: str, asked: dict[str, Any]) -> dict[str, Any]:
    answer = await client.request(f"$JS.API.STREAM.{what}", json.dumps(asked).encode(), timeout=CALL_SECONDS)
    said: dict[str, Any] = json.loads(answer.data)
    if "error" in said and said["error"].get("code") != 404:
        raise ServerAway(f"{what}: {said['error'].get('description')}")
    return said


async def _closed(client: Client) -> None:
    with suppress(nats.errors.Error, OSError, TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await client.close()


async def _quiet(_: Exception) -> None:
    """What goes wrong is raised where it was asked."""

"""Creation and deletion of the NATS streams of runs, except those of other installs.

Runs never create streams, because all share one account and a stream could capture subjects of others.

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
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import nats.errors
from nats.aio.client import Client, RawCredentials

from rlhfspec.messages import loop
from rlhfspec.messages.access.connecting import KEEP_SECONDS
from rlhfspec.messages.transport.jetstream.streams import Declared, Keeping, requests_for, stream_name
from rlhfspec.operator.shared.leftovers import OpenRun, Runs, ServerAway
from rlhfspec.runs.live.redis_client import words_of
from rlhfspec.runs.live.redis_users import ClusterRun
from rlhfspec.stage.tasks import to_the_end

_PASS_EVERY_SECONDS = 3.0
CALL_SECONDS = 2.0  # per answer
_NATS_CLOSE_SECONDS = 0.5
SWEEP_SECONDS = 60.0  # per pass
RUNS_AT_ONCE = 16  # runs whose streams are created concurrently
Call = tuple[str, dict[str, Any]]  # JetStream call and body
_INSTALL, _NAMESPACE = "rlhfspec.install", "rlhfspec.namespace"


def metadata_of(install: str, namespace: str) -> dict[str, str]:
    return {_INSTALL: install, _NAMESPACE: namespace}


def run_in(stream: str) -> str:
    """Return the run uid in a stream's name, or an empty text."""
    words = stream.split("_")
    return words[-2] if words[0] == "rlhf" and len(words) >= 4 else ""


def calls_of(run: OpenRun, install: str, there: Collection[str]) -> list[Call]:
    """Return the JetStream calls that create a run's streams and consumers, unless all are `there`."""
    keeping = Keeping(work_seconds=KEEP_SECONDS, metadata=metadata_of(install, run.namespace))
    calls: list[Call] = []
    is_lacking = False
    for subject, kind, consumers in loop.declarations(run.job, run.uid, run.stages):
        declared = Declared(kind, {each.name: each for each in consumers})
        of_stream, *of_consumers = requests_for(subject, declared, loop.MOST_PENDING, keeping)
        if stream_name(subject) not in there:
            is_lacking = True
            calls.append(of_stream)
        calls += of_consumers
    return calls if is_lacking else []


class Streams:
    """Streams of runs in NATS; `creds` come from `credentials.operator_creds`."""

    name, seconds = "NATS", _PASS_EVERY_SECONDS

    def __init__(self, url: str, install: str, creds: bytes | None, inbox: str, tls: ssl.SSLContext | None) -> None:
        options: dict[str, Any] = {"tls": tls} if tls is not None else {}
        if creds is not None:
            options |= {"user_credentials": RawCredentials(creds.decode()), "inbox_prefix": inbox.encode()}
        self._url = url
        self._install = install
        self._options = options
        self._of_others: set[str] = set()  # streams of other installs, remembered for good

    async def settle(self, runs: Runs) -> None:
        client = Client()
        try:
            async with asyncio.timeout(SWEEP_SECONDS):
                await self._connect(client)
                names = await self._names(client)  # first, so that a run that opens meanwhile is not swept
                refused = await self._declare(client, names, runs)
                await self._sweep(client, names, runs)
        except (OSError, TimeoutError, nats.errors.Error) as error:
            raise ServerAway(words_of(error)) from error
        finally:
            await to_the_end(_closed(client))
        if refused:
            raise ServerAway(refused[0])

    async def close(self) -> None:
        """Do nothing, because each pass has its own connection."""

    async def _connect(self, client: Client) -> None:
        async with asyncio.timeout(2 * CALL_SECONDS):
            await client.connect(self._url, name="operator", allow_reconnect=False, error_cb=_quiet, **self._options)

    async def _declare(self, client: Client, names: set[str], runs: Runs) -> list[str]:
        """Create missing streams of open runs and return refusals."""
        lacking = [calls for run in runs.to_declare() if (calls := calls_of(run, self._install, names))]
        refused: list[str] = []
        for start in range(0, len(lacking), RUNS_AT_ONCE):
            some = lacking[start : start + RUNS_AT_ONCE]
            made = await asyncio.gather(*(_make(client, calls, runs) for calls in some), return_exceptions=True)
            for error in filter(None, made):
                if not isinstance(error, ServerAway):
                    raise error
                refused.append(words_of(error))
        return refused

    async def _sweep(self, client: Client, names: set[str], runs: Runs) -> None:
        self._of_others &= names
        live = runs.live()
        left = sorted(name for name in names - self._of_others if (uid := run_in(name)) and uid not in live)
        owners = {name: owner for name in left if (owner := await self._owner(client, name)) is not None}
        over = runs.over(owners.values())
        for name, owner in owners.items():
            if owner in over:
                runs.check()
                await _call(client, f"STREAM.DELETE.{name}", {})

    async def _names(self, client: Client) -> set[str]:
        names, offset, total = set[str](), 0, 1
        while offset < total:
            page = await _call(client, "STREAM.NAMES", {"offset": offset})
            found, total = page.get("streams") or [], page.get("total", 0)
            if not found:
                break
            names.update(found)
            offset += len(found)
        return names

    async def _owner(self, client: Client, name: str) -> ClusterRun | None:
        info = await _call(client, f"STREAM.INFO.{name}", {})
        if "config" not in info:  # deleted meanwhile
            return None
        metadata: Mapping[str, str] = info["config"].get("metadata") or {}
        if metadata.get(_INSTALL) != self._install:
            self._of_others.add(name)
            return None
        return ClusterRun(metadata.get(_NAMESPACE, ""), run_in(name))


async def _make(client: Client, calls: list[Call], runs: Runs) -> None:
    for what, asked in calls:
        runs.check()
        await _call(client, what, asked)


async def _call(client: Client, what: str, asked: dict[str, Any]) -> dict[str, Any]:
    answer = await client.request(f"$JS.API.{what}", json.dumps(asked).encode(), timeout=CALL_SECONDS)
    said: dict[str, Any] = json.loads(answer.data)
    if "error" in said and said["error"].get("code") != 404:
        raise ServerAway(f"{what}: {said['error'].get('description')}")
    return said


async def _closed(client: Client) -> None:
    with suppress(nats.errors.Error, OSError, TimeoutError):
        async with asyncio.timeout(_NATS_CLOSE_SECONDS):
            await client.close()


async def _quiet(_: Exception) -> None:
    """Ignore an error of the client, because the failing call raises it too."""

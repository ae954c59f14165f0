"""Creation of Redis users of open runs, and removal of users and keys of ended runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from rlhfspec.operator.shared.leftovers import Runs, ServerAway
from rlhfspec.runs.live import redis_users as users
from rlhfspec.runs.live.redis_client import client, close, failures, words_of

_PASS_EVERY_SECONDS = 3.0
CALL_SECONDS = 2.0  # per answer
SWEEP_SECONDS = 60.0  # per pass
_COMMANDS_A_PIPELINE = 100  # commands per pipeline


class RedisUsers:
    """Users and keys of runs in Redis; `login` is (user, password)."""

    name, seconds = "Redis", _PASS_EVERY_SECONDS

    def __init__(self, url: str, master: bytes, login: tuple[str, str], authority: bytes) -> None:
        user, password = login
        options: dict[str, Any] = {"username": user, "password": password}
        if url.startswith("rediss:"):
            options["ssl_ca_data"] = authority.decode()
        self._master = master
        self._num_connects, self._made_after = 0, 0  # number of connects when users were last created
        self._redis = client(url, CALL_SECONDS, options, self._connected)

    async def _connected(self, connection: Any) -> None:
        await connection.on_connect()
        self._num_connects += 1

    async def settle(self, runs: Runs) -> None:
        try:
            async with asyncio.timeout(SWEEP_SECONDS):
                there = set(map(_text, await self._redis.acl_users()))
                await self._make(there, runs)
                await self._take_away(there, runs)
        except failures() as error:
            raise ServerAway(words_of(error)) from error

    async def close(self) -> None:
        await close(self._redis)

    async def _make(self, there: set[str], runs: Runs) -> None:
        """Create users that are not `there`, or all after a reconnect, as another version may have created them."""
        num_connects = self._num_connects
        known = there if num_connects == self._made_after else set[str]()
        commands = [
            ("ACL SETUSER", name, *users.rules_of(self._master, run))
            for run in runs.open()
            if (name := users.user_of(self._master, run)) not in known
        ]
        if (name := users.dashboard_user(self._master)) not in known:
            commands.append(("ACL SETUSER", name, *users.rules_of_dashboard(self._master)))
        await self._do(commands, runs)
        self._made_after = num_connects

    async def _take_away(self, there: set[str], runs: Runs) -> None:
        """Remove the keys and then the users of ended runs, so that the next pass can finish a failed one."""
        found = {name: run for name in there if (run := users.run_of(self._master, name)) is not None}
        over = runs.over(found.values())
        names = sorted(name for name, run in found.items() if run in over)
        if not names:
            return
        await self._do([("ACL SETUSER", name, "reset") for name in names], runs)
        keys = await self._keys_of({run.uid for run in over})
        await self._do([("UNLINK", *some) for some in _parts(keys)], runs)
        await self._do([("ACL DELUSER", *some) for some in _parts(names)], runs)

    async def _keys_of(self, runs: set[str]) -> list[bytes]:
        found = self._redis.scan_iter(match=f"{users.REDIS_PREFIX}:*", count=1000)
        return [key async for key in found if _text(key).split(":")[1] in runs]

    async def _do(self, commands: Sequence[tuple[Any, ...]], runs: Runs) -> None:
        for some in _parts(commands):
            runs.check()
            async with self._redis.pipeline(transaction=False) as pipeline:
                for command in some:
                    pipeline.execute_command(*command)
                await pipeline.execute()


def _text(said: bytes | str) -> str:
    """Decode a response of bytes or text."""
    return said.decode(errors="replace") if isinstance(said, bytes) else said


T = TypeVar("T")


def _parts(things: Sequence[T]) -> Iterator[Sequence[T]]:
    """Split a sequence into parts of `_COMMANDS_A_PIPELINE`.

    >>> [list(part) for part in _parts(range(150))][1][:2]
    [100, 101]
    """
    return (things[begin : begin + _COMMANDS_A_PIPELINE] for begin in range(0, len(things), _COMMANDS_A_PIPELINE))

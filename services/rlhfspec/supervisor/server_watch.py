"""Restarts of a run's servers with the same address and data, and of guardians and launcher."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from rlhfspec.errors import ServerFailed, StorageError
from rlhfspec.job.roles import FailurePolicy
from rlhfspec.messages.servers.guardian import NUM_GUARDIANS, Guardians
from rlhfspec.messages.servers.program import ServerProgram
from rlhfspec.messages.servers.room import refuse_full_disk
from rlhfspec.stage.base import Service
from rlhfspec.stage.tasks import together
from rlhfspec.stage.vitals import Vitals
from rlhfspec.supervisor.child import Starter
from rlhfspec.supervisor.restarts import Restarts
from rlhfspec.worker import exits

LOOK_SECONDS = 1.0
_GUARDIAN_RESTART_SECONDS = 0.1  # between two restarts of a guardian
_SERVER_FREE_BYTES = 64 << 10  # least free space
ROOM_SECONDS = 5.0  # time for a process to report the full disk first
_STEADY_SERVER_SECONDS = 10.0  # uptime that resets a server's restarts


class ServerWatch(Service):
    """Service that keeps servers running while needed. Raises ServerFailed, or StorageError on a full disk."""

    def __init__(
        self,
        vitals: Vitals,
        servers: Sequence[ServerProgram],
        guardians: Guardians,
        starter: Starter,
        policy: FailurePolicy,
        say: Callable[[str], None],
        until: asyncio.Event,
    ) -> None:
        super().__init__("servers", 0, vitals)
        self._until = until
        self._clock = vitals.clock
        self._servers = servers
        self._guardians = guardians
        self._starter = starter
        self._policy = policy
        self._say = say

    async def run(self) -> None:
        kept = [self._keep(server) for server in self._servers]
        keeping = asyncio.create_task(together(*kept, self._keep_guardians(), self._keep_starter(), self._keep_room()))
        stopped = asyncio.create_task(self._until.wait())
        try:
            with self.vitals.waiting("the end of the run"):
                await asyncio.wait([keeping, stopped], return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                keeping.result()
        finally:
            stopped.cancel()
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _keep(self, server: ServerProgram) -> None:
        restarts = Restarts(self._policy, random.Random(server.name))
        while True:
            began = self._clock.now()
            reason = exits.said(await server.wait())
            if self._clock.now() - began > _STEADY_SERVER_SECONDS:
                restarts.forget()
            delay = restarts.delay_after("killed")
            if delay is None:
                raise ServerFailed(server.name, f"{reason}; it ended {restarts.num_failures} times")
            self._say(f"{server.name}: {reason}; it is started again")
            await asyncio.sleep(0.0 if restarts.num_failures == 1 else delay)
            await server.start()

    async def _keep_guardians(self) -> None:
        """Restart guardians at once, because only they clean up after this process."""
        while True:
            if len(pids := self._guardians.pids) == NUM_GUARDIANS:
                await _end_of_one(pids)
            self._guardians.start()
            self._say("a guardian of this run ended; it is started again")
            await asyncio.sleep(_GUARDIAN_RESTART_SECONDS)

    async def _keep_starter(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if await self._starter.begin():
                self._say("the launcher of this run ended; it is started again")

    async def _keep_room(self) -> None:
        while self._servers:
            await asyncio.sleep(ROOM_SECONDS)
            with suppress(StorageError):
                self._look_for_room()
                continue
            await asyncio.sleep(ROOM_SECONDS)
            self._look_for_room()

    def _look_for_room(self) -> None:
        for server in self._servers:
            refuse_full_disk(server.folder, _SERVER_FREE_BYTES, f"{server.name}'s data")


async def _end_of_one(pids: Sequence[int]) -> None:
    """Wait until one of the processes ends."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    with ExitStack() as leaving:
        for pid in pids:
            leaving.callback(os.close, process := os.pidfd_open(pid))
            loop.add_reader(process, ended.set)
            leaving.callback(loop.remove_reader, process)
        await ended.wait()

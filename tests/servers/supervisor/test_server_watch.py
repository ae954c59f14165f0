"""Servers are restarted; a full disk ends the run before a wait for NATS hangs."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from disks import fill
from interpreters import Interpreters

from rlhfspec.errors import StorageError
from rlhfspec.job.roles import FailurePolicy
from rlhfspec.messages.servers.guardian import NUM_GUARDIANS, Guardians
from rlhfspec.messages.servers.nats import NatsServer
from rlhfspec.stage.vitals import Vitals
from rlhfspec.supervisor import server_watch
from rlhfspec.supervisor.server_watch import ServerWatch


async def test_a_full_disk_ends_the_run(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_watch, "ROOM_SECONDS", 0.05)
    server, guardians = NatsServer(disk / "nats", run="r1"), Guardians("r1")
    await server.start()
    watch = ServerWatch(
        Vitals(), [server], guardians, Interpreters({}), FailurePolicy(), lambda line: None, asyncio.Event()
    )
    watching = asyncio.create_task(watch.run())
    try:
        await asyncio.sleep(0.3)
        assert not watching.done()
        fill(disk)
        with pytest.raises(StorageError, match=r"nats: disk full: nats-server's data need 0.1 MB, and 0.0 MB are"):
            await watching
    finally:
        guardians.release()
        await server.stop()


async def test_a_disk_that_is_full_at_one_check_only_is_ignored(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []

    class Looking(ServerWatch):
        def _look_for_room(self) -> None:
            looks.append("")
            if len(looks) % 2:
                raise StorageError("out", "disk full")
            if len(looks) == 6:
                self._until.set()

    monkeypatch.setattr(server_watch, "ROOM_SECONDS", 0.01)
    server, guardians = NatsServer(disk / "nats", run="r1"), Guardians("r1")
    await server.start()
    try:
        await Looking(
            Vitals(), [server], guardians, Interpreters({}), FailurePolicy(), lambda line: None, asyncio.Event()
        ).run()
        assert len(looks) == 6
    finally:
        guardians.release()
        await server.stop()


async def test_servers_run_until_every_worker_has_left(tmp_path: Path) -> None:
    """A leaving worker needs NATS to return what it holds."""
    server, guardians, gone = NatsServer(tmp_path / "nats", run="r1"), Guardians("r1"), asyncio.Event()
    guardians.start()
    await server.start()
    said: list[str] = []
    watch = ServerWatch(Vitals(), [server], guardians, Interpreters({}), FailurePolicy(), said.append, gone)
    watching = asyncio.create_task(watch.run())
    try:
        await watch.stop()
        first = server.pid
        os.kill(first or 0, signal.SIGKILL)
        while server.pid in (None, first):
            assert not watching.done()
            await asyncio.sleep(0.01)
        assert said == ["nats-server: killed by SIGKILL; it is started again"]
        gone.set()
        await watching
    finally:
        guardians.release()
        await server.stop()


async def test_killed_guardians_are_replaced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without guardians, a supervisor that dies before the next look leaves everything behind."""
    monkeypatch.setattr(server_watch, "LOOK_SECONDS", 1e6)
    guardians, said = Guardians("r1"), list[str]()
    guardians.start()
    policy, gone = FailurePolicy(), asyncio.Event()
    watch = ServerWatch(Vitals(), [], guardians, Interpreters({}), policy, said.append, gone)
    watching = asyncio.create_task(watch.run())
    try:
        for num_killed in (1, NUM_GUARDIANS):
            first = guardians.pids
            await asyncio.sleep(0.05)
            for pid in first[:num_killed]:
                os.kill(pid, signal.SIGKILL)
            while len(set(guardians.pids) - set(first)) < num_killed:
                assert not watching.done()
                await asyncio.sleep(0.01)
        assert set(said) == {"a guardian of this run ended; it is started again"}
    finally:
        gone.set()
        await watching
        guardians.release()

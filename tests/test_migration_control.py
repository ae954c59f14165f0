"""Moves between processes: gRPC for what is said, a link for KV; who may ask, and what becomes of nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from movers import LONG, TOKENS, Generator, alone, assert_clean
from moving import make

from rlhfspec.errors import MalformedRecord
from rlhfspec.migration import messages
from rlhfspec.migration.base import NoReply, Peer
from rlhfspec.migration.control import DirectControl, GrpcControl, GrpcControlServer
from rlhfspec.records import Moved
from rlhfspec.servers.certificates import channel_credentials, create_credentials
from rlhfspec.service.health import Health
from rlhfspec.service.vitals import Vitals

ASK = messages.Ask(move="m", sample="x", number=1, source="s", destination="d")


@contextlib.asynccontextmanager
async def served(
    answer: Any, credentials: Path | None = None, **options: Any
) -> AsyncIterator[tuple[Peer, GrpcControlServer]]:
    """On a worker's own server, as the generator has it."""
    health = Health("generator", 1, Vitals(), credentials)
    control = GrpcControlServer(answer, **options)
    control.add_to(health.server)
    health.__enter__()
    try:
        yield Peer(name="generator-1", address=health.grpc_address, incarnation="d"), control
    finally:
        await asyncio.to_thread(health.__exit__, None, None, None)


@contextlib.contextmanager
def asking(credentials: Path | None = None, role: str = "generator") -> Any:
    control = GrpcControl(None if credentials is None else channel_credentials(credentials, role))
    try:
        yield control
    finally:
        control.close()


async def gone(message: bytes) -> bytes:
    return messages.to_bytes(messages.Gone(**messages.told(message).head(), here="e"))


def test_only_generators_of_the_run_may_ask(tmp_path: Path) -> None:
    create_credentials(tmp_path / "ours", ["generator", "reward"])
    create_credentials(tmp_path / "others", ["generator"])

    async def main() -> None:
        async with served(gone, tmp_path / "ours", askers=["generator"]) as (peer, server):
            with asking(tmp_path / "ours") as control:
                reply = messages.reply(await control.ask(peer, messages.to_bytes(ASK)))
                assert isinstance(reply, messages.Gone)
                with pytest.raises(NoReply, match="no question"):
                    await control.ask(peer, messages.to_bytes(reply))
                with pytest.raises(NoReply, match="malformed"):
                    await control.ask(peer, b"nonsense")
            with asking(tmp_path / "ours", "reward") as control, pytest.raises(NoReply, match="reward may not"):
                await control.ask(peer, messages.to_bytes(ASK))
            for credentials in (None, tmp_path / "others"):
                with asking(credentials) as control, pytest.raises(NoReply):
                    await control.ask(peer, messages.to_bytes(ASK), timeout=2.0)
            assert dict(server.refused) == {"malformed": 2, "role": 1}

    asyncio.run(main())


def test_who_does_not_answer_in_time_is_not_waited_for() -> None:
    async def main() -> None:
        never = asyncio.Event()
        ended = asyncio.Event()

        async def slow(message: bytes) -> bytes:
            await never.wait()
            ended.set()
            return b""

        direct = DirectControl()
        direct.serve("a", slow)
        async with served(slow) as (peer, _):
            with asking() as control:
                for way, whom in ((control, peer), (direct, Peer(name="a", address="a", incarnation="d"))):
                    with pytest.raises(NoReply):
                        await way.ask(whom, messages.to_bytes(ASK), timeout=0.2)
            never.set()
            await ended.wait()  # what was begun goes on
        with asking() as control, pytest.raises(NoReply):
            await control.ask(peer, messages.to_bytes(ASK), timeout=2.0)

    asyncio.run(main())


def test_a_direct_call_passes_on_what_is_no_message() -> None:
    async def main() -> None:
        direct = DirectControl()
        direct.serve("a", gone)
        with pytest.raises(MalformedRecord):
            await direct.ask(Peer(name="a", address="a", incarnation="d"), b"nonsense")

    asyncio.run(main())


THERE = """
import asyncio, json, sys
sys.path.insert(0, {tests!r})
from movers import Generator, assert_clean
from moving import bits, make
from test_migration_control import asking, served

async def main():
    with asking() as control:
        there = Generator("there", make(**{options!r}), control, kind={kind!r})
        async with served(there.mover.answer) as (peer, _):
            there.start()
            print(json.dumps([peer.address, there.peer.incarnation]), flush=True)
            await there.until(lambda: there.finished)
            print(json.dumps(bits(there.finished["x"])), flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            await there.mover.close()
            await there.stop()
    assert_clean(there)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_between_two_processes(kind: str) -> None:
    code = THERE.format(tests=str(Path(__file__).parent), kind=kind, options=LONG)
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdin as stdin, process.stdout as stdout:
        try:
            address, incarnation = json.loads(stdout.readline())
            peer = Peer(name="there", address=address, incarnation=incarnation)
            moved = asyncio.run(moved_to(peer, kind))
            assert moved.how == "kv", moved
            assert moved.num_bytes > 0
            token_ids, log_probs, tempered, reason = json.loads(stdout.readline())
            assert (tuple(token_ids), tuple(log_probs), tuple(tempered), reason) == alone(3)
            stdin.write("\n")
            stdin.flush()
            assert process.wait(60) == 0
        finally:
            process.kill()


async def moved_to(peer: Peer, kind: str) -> Moved:
    with asking() as control:
        here = Generator("here", make(**LONG), control, kind=kind)
        here.start()
        await control.ask(peer, messages.to_bytes(ASK))  # the way is open
        await here.submit("x", seed=3, max_tokens=TOKENS)
        await here.until(lambda: here.steps > 3)
        moved = await here.move("x", peer)
        await here.until(lambda: not here.engine.has_work)
        await here.mover.close()
        await here.stop()
    assert_clean(here)
    return moved

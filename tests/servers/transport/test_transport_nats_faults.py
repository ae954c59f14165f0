"""NATS failures: servers die, stop or refuse, and networks fall silent."""

import asyncio
import gc
import random
import time
import warnings
from asyncio import sslproto
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from nats_servers import NatsServer, Proxy

from rlhfspec.errors import InvalidRequest, MessageTooLarge, TransportUnavailable
from rlhfspec.messages.servers.credentials.certificates import ServerTls, client_tls, create_credentials
from rlhfspec.messages.servers.credentials.derived import new_nkey
from rlhfspec.messages.servers.nats import User, nats_config
from rlhfspec.messages.transport import dead_letters
from rlhfspec.messages.transport.base import Consumer, Message, Subscription
from rlhfspec.messages.transport.jetstream import connection
from rlhfspec.messages.transport.jetstream.proof import NatsProof
from rlhfspec.messages.transport.nats import NatsTransport

SUBJECT, DEAD, STATE = "rlhf.sums.sample", "rlhf.sums.dead", "rlhf.sums.weights"
REWARD = Consumer(name="reward", ack_wait_seconds=2.0, max_deliveries=None)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """The NATS client drops sockets of connections that fail; collected later, they would fail another's test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


async def connect(url: str, **options: Any) -> NatsTransport:
    return await NatsTransport.connect(url, name="test", **{"publish_timeout_seconds": 60.0, **options})


async def opened(url: str, *consumers: Consumer) -> NatsTransport:
    transport = await connect(url)
    await transport.declare(SUBJECT, "work", consumers)
    await transport.declare(DEAD, "state")
    await transport.declare(STATE, "state")
    return transport


class Traffic:
    def __init__(self, url: str, *, size: int = 1000) -> None:
        self._url = url
        self._size = size
        self._done = asyncio.Event()
        self._is_all = False  # of what will ever be published
        self.published: list[str] = []
        self.handled: Counter[str] = Counter()

    async def start(self) -> None:
        self._transports = [await opened(self._url, REWARD), await connect(self._url)]
        sender, receiver = self._transports
        reading = await receiver.subscribe(SUBJECT, REWARD)
        self._tasks = [asyncio.create_task(self._publish(sender, part)) for part in "abcdefgh"]
        self._tasks += [asyncio.create_task(self._handle(reading))]
        await self.flows()

    async def _publish(self, transport: NatsTransport, part: str) -> None:
        number = 0
        while not self._done.is_set():
            number += 1
            id = f"{part}{number}"
            await transport.publish(SUBJECT, random.randbytes(self._size), id=id)
            self.published.append(id)
            await asyncio.sleep(0.01)

    async def _handle(self, reading: Subscription) -> None:
        while not self._is_all or len(self.handled) < len(self.published):
            messages = await reading.pull(64, 1.0)
            self.handled.update(message.id for message in messages)
            await asyncio.gather(*(message.ack() for message in messages))

    async def flows(self) -> None:
        """Wait until messages published from now on are handled."""
        num_published, num_handled = len(self.published), len(self.handled)
        while len(self.published) < num_published + 20 or len(self.handled) < num_handled + 20:
            await asyncio.sleep(0.02)
            for task in self._tasks:
                if task.done():
                    task.result()

    async def finish(self) -> None:
        self._done.set()
        await asyncio.gather(*self._tasks[:-1])
        self._is_all = True
        await self._tasks[-1]
        reading = await self._transports[1].subscribe(SUBJECT, REWARD)
        assert await reading.pull(1, 2 * REWARD.ack_wait_seconds) == [], "all acknowledged"
        assert self.handled.keys() == set(self.published), "none is lost"
        assert not [id for id, times in self.handled.items() if times > 1], "none comes twice"
        await asyncio.gather(*(transport.close() for transport in self._transports))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path) as server:
        yield server


async def test_a_killed_server_loses_and_doubles_nothing(server: NatsServer) -> None:
    traffic = Traffic(server.url)
    await traffic.start()
    for _ in range(3):
        server.kill()
        await asyncio.sleep(0.3)
        server.start()
        await traffic.flows()
    await traffic.finish()


async def test_a_stopped_server_costs_only_time(server: NatsServer) -> None:
    traffic = Traffic(server.url)
    await traffic.start()
    server.stop()
    await asyncio.sleep(3.0)
    server.go_on()
    await traffic.flows()
    await traffic.finish()


async def test_a_silent_partition_with_unsent_bytes_ends(server: NatsServer) -> None:
    """nats-py alone waits up to 15 minutes to close such a socket."""
    async with Proxy(server.port) as proxy:
        transport = await opened(proxy.url, REWARD)
        watch = await transport.watch(STATE)
        proxy.fall_silent()
        big = [asyncio.create_task(transport.publish(SUBJECT, bytes(200_000), id=str(n))) for n in range(64)]
        other = await connect(server.url)
        await other.publish(STATE, b"new", id="w1", key="policy")  # nobody on the other side hears of it
        async with asyncio.timeout(60):
            assert len([stored for stored in await asyncio.gather(*big) if stored]) >= 1
            assert [message.id for message in await watch.pull(1, 60.0)] == ["w1"], "read again after the outage"
        reading = await other.subscribe(SUBJECT, REWARD)
        found: set[str] = set()
        while len(found) < 64:
            messages = await reading.pull(64, 20.0)
            assert messages
            found |= {message.id for message in messages}
            await asyncio.gather(*(message.ack() for message in messages))
        await transport.close()
        await other.close()


async def test_a_watch_receives_a_state_that_changed_during_an_outage(server: NatsServer) -> None:
    transport = await opened(server.url)
    watch = await transport.watch(STATE)
    await transport.publish(STATE, b"", id="p0", key="policy")
    assert [message.id for message in await watch.pull(9, 30.0)] == ["p0"]
    server.kill()
    publishing = asyncio.create_task(transport.publish(STATE, b"", id="p1", key="policy"))
    server.start()
    assert await publishing
    assert [message.id for message in await watch.pull(9, 20.0)] == ["p1"]
    assert await watch.pull(9, 0.2) == [], "p0 and p1 were seen"
    await transport.close()


async def test_a_publish_without_a_server_fails_after_its_timeout(server: NatsServer) -> None:
    transport = await opened(server.url, REWARD)
    hasty = await connect(server.url, publish_timeout_seconds=0.5)
    reading = await hasty.subscribe(SUBJECT, REWARD)
    await hasty.publish(SUBJECT, b"", id="a")
    [message] = await reading.pull(1, 30.0)
    server.kill()
    assert await reading.pull(1, 0.2) == [], "a pull ends at its timeout"
    with pytest.raises(TransportUnavailable, match=r"rlhf\.sums\.sample not stored for 0\.5 s: no answer"):
        await hasty.publish(SUBJECT, b"", id="b")
    with pytest.raises(TransportUnavailable, match="is not confirmed"):
        await message.ack()
    await hasty.close()
    await transport.close()


async def test_leaving_ends_all_waits_for_an_absent_server(tmp_path: Path) -> None:
    with NatsServer(tmp_path) as server:
        transport = await opened(server.url, REWARD)
        held = await transport.subscribe(SUBJECT, REWARD)
        await transport.publish(SUBJECT, b"1", id="1")
        [message] = await held.pull(1, 30.0)
        server.kill()
        waits = [transport.publish(SUBJECT, b"2", id="2"), message.ack(), transport.is_declared(SUBJECT)]
        tasks = [asyncio.create_task(wait) for wait in waits]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in tasks)
        transport.hurry(6.0)
        async with asyncio.timeout(60.0):
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [TransportUnavailable] * 3
        async with asyncio.timeout(12.0):  # its patience is at an end for all that follows
            for id in "345":
                with pytest.raises(TransportUnavailable):
                    await transport.publish(SUBJECT, b"", id=id)
        await transport.close()


async def test_dead_letters_of_large_messages_leave_out_their_data(tmp_path: Path) -> None:
    with NatsServer(tmp_path, "max_payload: 65536") as server:
        transport = await opened(server.url, REWARD)
        await transport.publish(SUBJECT, bytes(65_000), id="large")
        with pytest.raises(MessageTooLarge, match=r"sample: huge has 700\d\d bytes; the server accepts 65536"):
            await transport.publish(SUBJECT, bytes(70_000), id="huge")
        [message] = await (await transport.subscribe(SUBJECT, REWARD)).pull(9, 30.0)
        await message.term("no sample " * 60)
        [seen] = await (await transport.watch(DEAD)).pull(1, 30.0)
        letter = dead_letters.decode(seen.data)
        assert (letter.id, letter.data) == ("large", b"")
        assert "65000 bytes that are left out" in letter.reason
        await transport.close()


async def test_a_stale_refusal_does_not_take_a_message_from_its_new_holder(server: NatsServer) -> None:
    consumer = Consumer(name="reward", ack_wait_seconds=4.0)
    transport = await opened(server.url, consumer)
    readings = [await transport.subscribe(SUBJECT, consumer) for _ in "ab"]
    await transport.publish(SUBJECT, b"", id="a")
    began = time.monotonic()
    [stale] = await readings[0].pull(1, 30.0)
    [current] = await readings[1].pull(1, 30.0)
    assert current.num_deliveries == 2
    await current.in_progress()
    await stale.nak()
    await stale.in_progress()
    again = await readings[0].pull(1, 0.2)
    assert again == [] or time.monotonic() - began > 2 * consumer.ack_wait_seconds, "its holder still had it"
    await current.ack()
    await transport.close()


async def test_a_refusal_near_the_end_of_a_lease_is_not_sent(server: NatsServer) -> None:
    consumer = Consumer(name="reward", ack_wait_seconds=4.0)
    transport = await opened(server.url, consumer)
    reading = await transport.subscribe(SUBJECT, consumer)
    await transport.publish(SUBJECT, b"", id="a")
    began = time.monotonic()
    [late] = await reading.pull(1, 30.0)
    await asyncio.sleep(3.2)
    await late.nak()
    again = await reading.pull(1, 0.2)
    assert again == [] or time.monotonic() - began > consumer.ack_wait_seconds
    await transport.close()


async def test_messages_pulled_but_not_handed_out_are_returned_at_once(server: NatsServer) -> None:
    consumer = Consumer(name="reward", ack_wait_seconds=60.0)
    transport = await opened(server.url, consumer)
    leaving, staying = [await transport.subscribe(SUBJECT, consumer) for _ in "ab"]
    waiting = asyncio.create_task(leaving.pull(1, 30.0))
    await asyncio.sleep(0.2)
    waiting.cancel()  # its request is still with the server
    with suppress(asyncio.CancelledError):
        await waiting
    await transport.publish(SUBJECT, b"", id="a")
    await asyncio.sleep(0.2)
    await leaving.close()
    assert [message.id for message in await staying.pull(1, 30.0)] == ["a"]
    await transport.close()


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        ('{"version": "2.9.10", "jetstream": true}', r"must be 2\.10\.26 or newer \(got '2\.9\.10'\)"),
        ('{"version": "2.10.25", "jetstream": true}', r"must be 2\.10\.26 or newer"),
        ('{"version": "2.15.1"}', "must run with JetStream"),
        ('{"version": "2.15.1", "jetstream": true, "tls_required": true}', "speaks TLS only"),
        ("certainly", "is not a NATS server"),
    ],
)
async def test_an_unsuitable_server_is_refused_by_its_greeting(info: str, problem: str) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"INFO {info}\r\n".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as fake:
        with pytest.raises(InvalidRequest, match=problem):
            await connect(f"nats://127.0.0.1:{fake.sockets[0].getsockname()[1]}")


async def test_a_missing_or_silent_server_is_reported_at_once() -> None:
    with pytest.raises(TransportUnavailable, match=r"nats://127\.0\.0\.1:9: no server there"):
        await connect("nats://127.0.0.1:9")

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as silent:
        url = f"nats://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        with pytest.raises(TransportUnavailable, match=r"no answer within 0\.3 s"):
            await connect(url, connect_timeout_seconds=0.3)


async def test_wrong_credentials_are_said_at_once(tmp_path: Path) -> None:
    credentials, others = tmp_path / "credentials", tmp_path / "others"
    keys = create_credentials(credentials, ["reward"])
    create_credentials(others, ["reward"])
    everything = User(public_key=keys["reward"], publish=[">"], subscribe=[">"])
    (tmp_path / "unknown.seed").write_text(new_nkey()[0])
    (tmp_path / "broken.seed").write_text("SUA")

    with NatsServer(
        tmp_path / "nats", nats_config({"reward": everything}, ServerTls.of(credentials, "nats"))
    ) as server:
        url, good = server.url, credentials / "reward.seed"
        tls = client_tls(credentials, "reward")
        await (await connect(url, proof=NatsProof(nkey_seed=good), tls=tls)).close()
        for seed, problem in (
            (tmp_path / "unknown.seed", r"the server refuses the key in .*unknown\.seed"),
            (tmp_path / "broken.seed", "is not an NKEY seed"),
            (tmp_path / "absent.seed", "cannot be read: No such file"),
            (None, "the server refuses a connection without credentials"),
        ):
            with pytest.raises(InvalidRequest, match=problem):
                await connect(url, proof=NatsProof(nkey_seed=seed), tls=tls)
        with pytest.raises(InvalidRequest, match="certificate cannot be trusted"):
            await connect(url, proof=NatsProof(nkey_seed=good), tls=client_tls(others, "reward"))


async def test_a_server_without_tls_is_not_spoken_to_in_the_clear(tmp_path: Path) -> None:
    create_credentials(tmp_path / "credentials", ["reward"])

    with NatsServer(tmp_path / "nats") as server, pytest.raises(InvalidRequest, match="must speak TLS"):
        await connect(server.url, tls=client_tls(tmp_path / "credentials", "reward"))


async def test_a_server_without_tls_gets_no_credentials(tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    keys = create_credentials(credentials, ["reward"])
    everything = User(public_key=keys["reward"], publish=[">"], subscribe=[">"])
    heard = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"version": "2.15.1", "jetstream": true, "auth_required": true, "nonce": "n1"}\r\n')
        with suppress(OSError):
            heard.extend(await reader.read(1024) + b"|")
        writer.close()

    config = nats_config({"reward": everything}, ServerTls.of(credentials, "nats"))
    with NatsServer(tmp_path / "nats", config) as server:
        proof, tls = NatsProof(nkey_seed=credentials / "reward.seed"), client_tls(credentials, "reward")
        transport = await connect(server.url, proof=proof, tls=tls)
        server.kill()
        async with await asyncio.start_server(listen, "127.0.0.1", server.port):
            async with asyncio.timeout(30.0):
                while heard.count(b"|") < 2:
                    await asyncio.sleep(0.01)
        assert bytes(heard).strip(b"|") == b""
        server.start()
        assert await transport.answers("rlhf.a.sample", 20.0), "it is known again when it is back"
        await transport.close()


async def test_chaos_loses_nothing(tmp_path: Path) -> None:
    """Three consumers of two workers each acknowledge, refuse, give up and die while the server is killed."""
    names, num_ids = ("reward", "reference", "trainer"), 150
    consumers = {name: Consumer(name=name, ack_wait_seconds=1.0, max_deliveries=4) for name in names}
    done: dict[str, set[str]] = {name: set() for name in names}
    buried: dict[str, set[str]] = {name: set() for name in names}
    dice, is_over = random.Random(5), asyncio.Event()

    async def end(name: str, message: Message, fate: float) -> None:
        if fate < 0.75:
            await message.ack()
            done[name].add(message.id)
        elif fate < 0.85:
            await message.nak(dice.choice([0.0, 0.2]))
        elif fate < 0.9:
            await message.term("by chance")

    async def work(url: str, name: str) -> None:
        while not is_over.is_set():
            try:
                transport = await connect(url)
            except TransportUnavailable:
                await asyncio.sleep(0.05)  # as who starts a process again would
                continue
            try:
                reading = await transport.subscribe(SUBJECT, consumers[name])
                for _ in range(dice.randint(5, 20)):
                    if is_over.is_set():
                        break
                    for message in await reading.pull(dice.randint(1, 16), 0.5):
                        await end(name, message, dice.random())
            finally:
                await transport.close()

    async def num_left(control: NatsTransport) -> int:
        return int((await control._connection.api("STREAM.INFO.rlhf_sums_sample"))["state"]["messages"])

    with NatsServer(tmp_path) as server:
        url = server.url
        control = await opened(url, *consumers.values())
        letters = await control.watch(DEAD)
        workers = [asyncio.create_task(work(url, name)) for name in names for _ in range(2)]
        publishing = [asyncio.create_task(control.publish(SUBJECT, b"5", id=str(n))) for n in range(num_ids)]
        for _ in range(2):
            await asyncio.sleep(0.7)
            server.kill()
            await asyncio.sleep(0.2)
            server.start()
        await asyncio.gather(*publishing)
        async with asyncio.timeout(90):
            while any(len(done[name] | buried[name]) < num_ids for name in names) or await num_left(control):
                for message in await letters.pull(100, 0.2):
                    letter = dead_letters.decode(message.data)
                    buried[letter.consumer].add(letter.id)
                for worker in workers:
                    if worker.done():
                        worker.result()
        is_over.set()  # cancelled while it connects, nats-py may go on, or leave its socket open
        await asyncio.gather(*workers)
        await control.close()


async def test_giving_up_a_closed_tls_socket_raises_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: Any = sslproto._SSLProtocolTransport(asyncio.get_running_loop(), None)  # type: ignore[arg-type]
    monkeypatch.setattr(connection, "_socket_of", lambda client: closed)
    connection._Client()._give_up(closed)

"""NATS keeps the transport contract on a real server."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from nats_servers import NatsServer, Proxy

from rlhfspec.messages.transport.base import Consumer
from rlhfspec.messages.transport.nats import NatsTransport
from rlhfspec.testing.transport import TransportContract
from rlhfspec.testing.transport_harness import TransportHarness


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture(autouse=True)
def _forgotten(server: NatsServer) -> Iterator[None]:
    """Purge after a test, also a failed one, as the server would deduplicate its messages on a rerun."""
    yield
    asyncio.run(forget_everything(server.url))


class TestNatsTransport(TransportContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: NatsServer) -> None:
        self._url = server.url

    @asynccontextmanager
    async def open(self, *, max_pending: int, publish_timeout_seconds: float) -> AsyncIterator[TransportHarness]:
        transport = await NatsTransport.connect(
            self._url, name="test", max_pending=max_pending, publish_timeout_seconds=publish_timeout_seconds
        )
        try:
            yield TransportHarness(transport)
        finally:
            await transport.close()


async def forget_everything(url: str) -> None:
    import nats

    client = await nats.connect(url)
    streams = client.jsm()
    for info in await streams.streams_info():
        await streams.delete_stream(info.config.name or "")
    await client.close()


async def test_a_worker_uses_subjects_that_another_client_declared(server: NatsServer) -> None:
    reward = Consumer(name="reward", max_deliveries=None)
    opening = await NatsTransport.connect(server.url, name="control")
    await opening.declare("rlhf.a.sample", "work", [reward])
    await opening.declare("rlhf.a.load", "signal")
    worker = await NatsTransport.connect(server.url, name="reward")
    view = await worker.watch("rlhf.a.load")
    assert await worker.publish("rlhf.a.load", b"busy", id="l")
    assert await worker.publish("rlhf.a.sample", b"5", id="s")
    [message] = await (await worker.subscribe("rlhf.a.sample", reward)).pull(1, 30.0)
    await message.ack()
    assert [seen.data for seen in await view.pull(1, 30.0)] == [b"busy"]
    await worker.close()
    await opening.close()


async def test_unsubscribe_is_confirmed_before_late_messages_are_collected(server: NatsServer) -> None:
    async with Proxy(server.port) as proxy:
        reward = Consumer(name="reward", max_deliveries=None)
        transport = await NatsTransport.connect(proxy.url, name="reward")
        await transport.declare("rlhf.a.sample", "work", [reward])
        reading = await transport.subscribe("rlhf.a.sample", reward)
        assert await reading.pull(1, 0.0) == []
        await reading.close()
        assert b"PING" in proxy.sent.rpartition(b"UNSUB")[2]
        await transport.close()


async def test_leaving_while_messages_arrive_returns_all_of_them_at_once(server: NatsServer) -> None:
    """Messages sent before the server learns of the leave return at once, not after the ack wait."""
    reference = Consumer(name="reference", ack_wait_seconds=60.0, max_deliveries=None)
    leaving = await NatsTransport.connect(server.url, name="reference")
    sending = await NatsTransport.connect(server.url, name="generator")
    await sending.declare("rlhf.a.sample", "work", [reference])
    draw = random.Random(0)
    for number in range(300):
        reading = await leaving.subscribe("rlhf.a.sample", reference)
        pull = asyncio.create_task(reading.pull(1, 30.0))
        publish = asyncio.create_task(sending.publish("rlhf.a.sample", b"5", id=f"{number}"))
        await asyncio.sleep(draw.random() * 0.003)
        pull.cancel()
        [got] = await asyncio.gather(pull, return_exceptions=True)
        await reading.close()
        await publish
        if isinstance(got, BaseException):
            other = await leaving.subscribe("rlhf.a.sample", reference)
            got = await other.pull(1, 30.0)
            await other.close()
        assert [message.id for message in got] == [f"{number}"]
        await got[0].ack()
    await leaving.close()
    await sending.close()

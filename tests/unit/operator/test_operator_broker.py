"""Detection of an unavailable NATS or Redis by the operator."""

import asyncio

import pytest
from shared_servers import free_port

from rlhfspec.operator.deciding.observed import Said
from rlhfspec.operator.shared import broker


async def test_a_missed_dial_of_the_broker_is_repeated_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "DIAL_SECONDS", 3600.0)
    monkeypatch.setattr(broker, "DIAL_AGAIN_SECONDS", 0.0)
    port = free_port()
    told = asyncio.get_running_loop().create_future()
    dialling = broker.Dialling({"NATS": f"tls://127.0.0.1:{port}"}, told.set_result)
    dial = asyncio.create_task(dialling.run(lambda: True))
    said: Said | None = await asyncio.wait_for(told, 60)
    dial.cancel()
    assert said == Said("BrokerUnavailable", f"NATS at 127.0.0.1:{port}: Connection refused")


async def test_a_slow_broker_is_not_reported_as_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does on a busy node while jobs start."""
    monkeypatch.setattr(broker, "MOST_MISSED", 1)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await asyncio.sleep(2.5)
            writer.write(b"INFO {}\r\n")
        finally:
            writer.close()

    told: list[Said | None] = []
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as slow:
        await broker.Dialling({"NATS": f"nats://127.0.0.1:{slow.sockets[0].getsockname()[1]}"}, told.append).dial()
    assert told == []

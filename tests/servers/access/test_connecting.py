from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from nats_servers import NatsServer

from rlhfspec.errors import TransportUnavailable
from rlhfspec.messages.access.connecting import connect
from rlhfspec.messages.access.connections import Connections


def connections(url: str, folder: Path) -> Connections:
    return Connections(
        uid="3f2a", job_file=folder / "job.json", base_folder=folder, folder=folder, nats_url=url, weights="grpc"
    )


async def test_a_server_that_comes_later_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with NatsServer(tmp_path) as server:
        server.kill()
        connecting = asyncio.create_task(
            connect(connections(server.url, tmp_path), "reward", name="reward-0", patience_seconds=60.0)
        )
        async with asyncio.timeout(60):
            while "no server there" not in caplog.text:
                await asyncio.sleep(0.01)
        await asyncio.to_thread(server.start)
        await (await connecting).close()
    assert caplog.text.count("no server there") == 1


async def test_an_absent_server_is_reported_at_the_deadline(tmp_path: Path) -> None:
    asked = connections("nats://127.0.0.1:9", tmp_path)
    with pytest.raises(TransportUnavailable, match="no server there"):
        await connect(asked, "reward", name="reward-0", patience_seconds=0.3)

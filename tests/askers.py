"""A generator that is asked about moves, and one that asks."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

from rlhfspec.messages.servers.credentials.certificates import client_tls, server_tls
from rlhfspec.moves.migration.base import Peer
from rlhfspec.moves.migration.control import StreamControl, StreamControlServer


@contextlib.asynccontextmanager
async def served(
    answer: Any, credentials: Path | None = None, **options: Any
) -> AsyncIterator[tuple[Peer, StreamControlServer]]:
    tls = server_tls(credentials, "generator") if credentials else None
    server = StreamControlServer(tls=tls, **options)
    server.serve(answer)
    with closing(server):
        yield Peer(name="generator-1", address=server.address, incarnation="d"), server


@contextlib.contextmanager
def asking(credentials: Path | None = None, role: str = "generator") -> Any:
    with closing(StreamControl(None if credentials is None else client_tls(credentials, role))) as control:
        yield control

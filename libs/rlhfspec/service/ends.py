"""What a generator needs so that samples leave it and come to it: who it is, how others are asked, how KV lands.

In one process the ends of all generators share a `DirectControl`; between processes each worker's gRPC server answers.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rlhfspec.migration.base import Control, Custody
from rlhfspec.migration.control import Answer, DirectControl, GrpcControl, GrpcControlServer
from rlhfspec.migration.engine_calls import EngineCalls
from rlhfspec.migration.links.opening import make_landing, open_sending
from rlhfspec.migration.mover import Mover
from rlhfspec.migration.sendings import Links
from rlhfspec.servers.certificates import channel_credentials, client_tls, server_tls
from rlhfspec.service.health import Health
from rlhfspec.transport.clock import Clock

if TYPE_CHECKING:
    from rlhfspec.engine.base import EngineProtocol

MOVERS = ("generator",)  # roles that may ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """`incarnation`: of this worker's process, what its WorkerInfo is called. `host`: where others reach it."""

    incarnation: str
    control: Control
    serve: Callable[[Answer], None]
    host: str = "127.0.0.1"
    tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None  # of who listens, of who connects

    @classmethod
    def direct(cls, incarnation: str, control: DirectControl) -> Self:
        return cls(incarnation=incarnation, control=control, serve=partial(control.serve, incarnation))

    @classmethod
    def between_processes(cls, incarnation: str, role: str, health: Health, credentials: Path | None) -> Self:
        """In the running event loop, before the gRPC server of `health` starts."""
        late = _Late()
        server = GrpcControlServer(late.answer, askers=MOVERS if credentials else None)
        server.add_to(health.server)
        return cls(
            incarnation=incarnation,
            control=GrpcControl(channel_credentials(credentials, role) if credentials else None),
            serve=late.serve,
            host=health.grpc_address.rpartition(":")[0],
            tls=(server_tls(credentials, role), client_tls(credentials, role)) if credentials else None,
        )

    def mover(
        self, engine: EngineProtocol, calls: EngineCalls, custody: Custody, clock: Clock, *, name: str, link: str
    ) -> Mover:
        listen, connect = self.tls or (None, None)
        landing = make_landing(link, host=self.host, tls=listen)
        links = Links(landing, partial(open_sending, tls=connect))
        mover = Mover(name, self.incarnation, engine, calls, self.control, links, custody, clock)
        self.serve(mover.answer)
        return mover


class _Late:
    """Questions wait for who answers them: a server has to know its methods before it starts."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def serve(self, answer: Answer) -> None:
        """From any thread."""
        self._answer.get_loop().call_soon_threadsafe(self._answer.set_result, answer)

    async def answer(self, message: bytes) -> bytes:
        return await (await asyncio.shield(self._answer))(message)

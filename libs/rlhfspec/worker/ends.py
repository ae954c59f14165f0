"""Ends of a generator's control connection, for moves of its samples and for calls of clients."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rlhfspec.messages.servers.credentials.certificates import client_tls, server_tls
from rlhfspec.messages.transport.clock import Clock
from rlhfspec.moves.migration.base import Custody, MoveControl
from rlhfspec.moves.migration.control import Answer, DirectControl, StreamControl, StreamControlServer
from rlhfspec.moves.migration.engine_calls import EngineCalls
from rlhfspec.moves.migration.links.opening import Links, make_landing, open_sending
from rlhfspec.moves.migration.mover import Mover

if TYPE_CHECKING:
    from rlhfspec.engine.base import MovableByTokens

MOVERS = ("generator",)  # roles that may move sequences
CALLER = "gateway"  # role that may call for clients


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveEndpoint:
    """Endpoint of a worker's moves, named by its WorkerInfo's id. Close it after the mover, in the event loop."""

    incarnation: str
    control: MoveControl
    serve: Callable[[Answer], None]
    serve_caller: Callable[[Answer], None] | None = None  # None: calls need certificates
    address: str = ""
    host: str = "127.0.0.1"
    link_port: int = 0  # 0: any that is free
    tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None  # server and client context
    close: Callable[[], None] = lambda: None

    @classmethod
    def direct(cls, incarnation: str, control: DirectControl) -> Self:
        return cls(incarnation=incarnation, control=control, serve=partial(control.serve, incarnation))

    @classmethod
    def between_processes(
        cls,
        incarnation: str,
        role: str,
        host: str,
        credentials: Path | None,
        *,
        port: int = 0,
        link_port: int = 0,
        worker_host: str | None = None,
    ) -> Self:
        tls = (server_tls(credentials, role), client_tls(credentials, role, worker_host)) if credentials else None
        listen, connect = tls or (None, None)
        server = StreamControlServer(host, port, tls=listen, askers=(*MOVERS, CALLER) if credentials else None)
        control = StreamControl(connect, answerers=MOVERS if credentials else None)

        def close() -> None:
            control.close()
            server.close()

        return cls(
            incarnation=incarnation, control=control, serve=partial(server.serve, role=role if credentials else ""),
            serve_caller=partial(server.serve, role=CALLER) if credentials else None, address=server.address,
            host=host, tls=tls, link_port=link_port, close=close,
        )  # fmt: skip

    def mover(
        self, engine: MovableByTokens, calls: EngineCalls, custody: Custody, clock: Clock, *, name: str, link: str
    ) -> Mover:
        listen, connect = self.tls or (None, None)
        landing = make_landing(link, host=self.host, port=self.link_port, tls=listen)
        links = Links(landing, partial(open_sending, tls=connect))
        mover = Mover(name, self.incarnation, engine, calls, self.control, links, custody, clock)
        self.serve(mover.answer)
        return mover


def calling(credentials: Path, worker_host: str | None) -> StreamControl:
    """Return the gateway's end, which asks generators only."""
    return StreamControl(client_tls(credentials, CALLER, worker_host), answerers=MOVERS)

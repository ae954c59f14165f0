"""Servers as a user has them: a Redis with a port, and what may stand in front of a server, such as TLS, which the
extra's Redis cannot do."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from shared_servers import free_port

from rlhfspec.messages.servers import find
from rlhfspec.messages.servers.credentials.certificates import ServerTls

NOTHING: Mapping[bytes, bytes] = {}


class RedisServer:
    """Stopped at the end of the block. `config`: lines of its file."""

    def __init__(self, folder: Path, config: str = "") -> None:
        self._folder = folder
        self._config = config
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder / "redis.conf"
        config.write_text(f'bind 127.0.0.1\nport {self.port}\nsave ""\ndir {self._folder}\n{self._config}\n')
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([str(find.redis_server()), str(config)], stdout=log, stderr=log)
        until_it_listens(self.port, self._process)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None


def until_it_listens(port: int, process: subprocess.Popen[bytes] | None = None) -> None:
    end = time.monotonic() + 30
    while True:
        assert process is None or process.poll() is None, "it ended"
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            assert time.monotonic() < end, "nobody listens"
            time.sleep(0.02)


class Front:
    """In front of a server on this machine, in a thread of its own: speaks TLS where the server does not, or says
    something else of it (`says`: what for what, of the same length)."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None, says: Mapping[bytes, bytes] = NOTHING) -> None:
        self._to = port
        self._tls = tls
        self._says = says
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls))
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, to_writer), _pump(to_reader, writer, self._says), return_exceptions=True)

    def _do(self, what):  # type: ignore[no-untyped-def]
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(30.0)


async def _pump(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, says: Mapping[bytes, bytes] = NOTHING
) -> None:
    try:
        while data := await source.read(1 << 16):
            for there, here in says.items():
                data = data.replace(there, here)
            target.write(data)
            await target.drain()
    finally:
        target.close()


def tls_config(keys: Path, *, verify: bool) -> str:
    files = ServerTls.of(keys, "nats")
    lines = f'cert_file: "{files.certificate}", key_file: "{files.key}", ca_file: "{files.authority}"'
    return f"tls {{ {lines}, verify: {str(verify).lower()} }}"

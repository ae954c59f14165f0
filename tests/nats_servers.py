"""A real nats-server for a test on a free port, and faults of it."""

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

BINARY = Path(sys.executable).with_name("nats-server")


class NatsServer:
    """Server, stopped at the end of the block. `config`: configuration lines."""

    def __init__(self, folder: Path, config: str = "") -> None:
        self._folder = folder
        self._config = f"{config}\njetstream: enabled\n"
        self._port = -1
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        config, log = self._folder / "nats.conf", self._folder / "nats.log"
        config.write_text(self._config)
        log.unlink(missing_ok=True)
        command = [str(BINARY), "-a", "127.0.0.1", "-p", str(self._port), "-sd", str(self._folder / "data")]
        self._process = subprocess.Popen([*command, "-c", str(config), "-l", str(log)])
        end = time.monotonic() + 30
        while not (log.exists() and "Server is ready" in (text := log.read_text())):
            assert self._process.poll() is None, log.read_text()
            assert time.monotonic() < end, "the server is not ready"
            time.sleep(0.01)
        found = re.search(r"Listening for client connections on 127\.0\.0\.1:(\d+)", text)
        assert found is not None, text
        self._port = int(found[1])

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)


class Proxy:
    """Proxy to a local server that can fall silent: it stops reading and closes nothing."""

    def __init__(self, port: int) -> None:
        self.sent = bytearray()  # by all clients
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def fall_silent(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, to_writer]
        for source, target, saw in ((reader, to_writer, self.sent.extend), (to_reader, writer, None)):
            task = asyncio.create_task(_pump(source, target, saw))
            self._tasks.add(task)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, saw: Callable[[bytes], None] | None) -> None:
    with suppress(OSError):
        while data := await source.read(1 << 16):
            if saw is not None:
                saw(data)
            sink.write(data)
            await sink.drain()
        sink.close()

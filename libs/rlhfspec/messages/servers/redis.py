"""Valkey or Redis for data that may be lost, on a private socket."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rlhfspec.errors import ServerFailed
from rlhfspec.messages.servers import find
from rlhfspec.messages.servers.program import ServerProgram, write_secret

MAX_MEMORY = "64mb"
_LONGEST_SOCKET_PATH = 100  # bytes; the system's limit is 107 (Linux) or 103 (macOS)


class RedisServer(ServerProgram):
    name = "valkey-server"

    def __init__(
        self, folder: Path, *, run: str, socket_folder: Path | None = None, password_file: Path | None = None
    ) -> None:
        """Create a server; its socket is in `socket_folder` if its path in `folder` is too long."""
        super().__init__(folder, run=run)
        self._password_file = password_file
        self._socket = _socket_path(self.folder, socket_folder or self.folder)
        self.url = f"unix://{self._socket}"

    def _command(self) -> list[str]:
        self.folder.chmod(0o700)
        self._socket.unlink(missing_ok=True)  # left by a killed server
        config = self.folder / "redis.conf"
        write_secret(config, self._config().encode())
        return [str(find.redis_server()), str(config)]

    def _config(self) -> str:
        lines = [
            "port 0",
            f"unixsocket {_quoted(self._socket)}",
            "unixsocketperm 600",
            f"dir {_quoted(self.folder)}",
            f"logfile {_quoted(self.log)}",
            'save ""',  # nothing on disk: processes publish everything again
            "appendonly no",
            f"maxmemory {MAX_MEMORY}",
            "maxmemory-policy allkeys-lru",
            "databases 1",
            "set-proc-title no",  # the title would overwrite the environment, which the guardian reads
        ]
        if self._password_file is not None:
            lines.append(f"requirepass {_quoted(self._password_file.read_text().strip())}")
        return "\n".join([*lines, ""])

    async def _ready(self) -> bool:
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
        except OSError:
            return False
        try:
            writer.write(b"PING\r\n")
            return bool(await reader.readline())
        finally:
            writer.close()
            await writer.wait_closed()


def _socket_path(*folders: Path) -> Path:
    paths = [folder / "redis.sock" for folder in folders]
    short = [path for path in paths if len(bytes(path)) <= _LONGEST_SOCKET_PATH]
    if not short:
        raise ServerFailed(
            RedisServer.name, f"{paths[-1]} is too long for a socket: at most {_LONGEST_SOCKET_PATH} bytes"
        )
    return short[0]


def _quoted(text: object) -> str:
    escaped = str(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'

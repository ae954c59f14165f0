"""Configuration and process of nats-server with JetStream, one account and one user per role."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhfspec.messages.servers import find
from rlhfspec.messages.servers.credentials.certificates import ServerTls
from rlhfspec.messages.servers.program import ServerProgram, write_secret

MAX_PAYLOAD_BYTES = 8 << 20  # a sample or its dead letter takes about 25 bytes per token
_ACCOUNT = "JOB"


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """NATS user of one role with its public NKEY and allowed subjects."""

    public_key: str
    publish: Sequence[str]
    subscribe: Sequence[str]


def nats_config(users: Mapping[str, User], tls: ServerTls | None) -> str:
    """Return the server's configuration; without users (tests only) every client has all rights."""
    lines = [f"max_payload: {MAX_PAYLOAD_BYTES}", "jetstream {}"]  # the storage folder is an argument
    if tls is not None:
        lines += [
            "tls {",
            f"  cert_file: {quoted(tls.certificate)}",
            f"  key_file: {quoted(tls.key)}",
            f"  ca_file: {quoted(tls.authority)}",
            "  verify: true",  # every client needs a certificate of the run
            '  min_version: "1.2"',
            "}",
        ]
    if users:
        lines += ["accounts {", f"  {_ACCOUNT} {{", "    jetstream: enabled", "    users: ["]
        lines += [f"      {_user(user)}" for user in users.values()]
        lines += ["    ]", "  }", "}"]
    return "\n".join(lines)


def _user(user: User) -> str:
    publish, subscribe = _allowed(user.publish), _allowed(user.subscribe)
    return f"{{nkey: {quoted(user.public_key)}, permissions: {{publish: {publish}, subscribe: {subscribe}}}}}"


def _allowed(subjects: Iterable[str]) -> str:
    """Return permissions for exactly these subjects; an empty allow list would allow all."""
    names = ", ".join(map(quoted, subjects))
    return f"{{allow: [{names}]}}" if names else '{deny: [">"]}'


def quoted(text: object) -> str:
    return json.dumps(str(text), ensure_ascii=False)


class NatsServer(ServerProgram):
    """Process of nats-server on localhost with streams in files; restarts keep its port."""

    name = "nats-server"

    def __init__(
        self, folder: Path, *, run: str, users: Mapping[str, User] | None = None, tls: ServerTls | None = None
    ) -> None:
        super().__init__(folder, run=run)
        self._users = users or {}
        self._tls = tls
        self._port = -1  # any free port

    def _command(self) -> list[str]:
        config = self.folder / "nats.conf"
        write_secret(config, nats_config(self._users, self._tls).encode())
        for stale in self.folder.glob("*.ports"):  # left by a killed server
            stale.unlink()
        return [
            str(find.nats_server()), "-c", str(config), "-a", "127.0.0.1", "-p", str(self._port),
            "-sd", str(self.folder / "store"), "--ports_file_dir", str(self.folder), "-l", str(self.log),
        ]  # fmt: skip

    async def _ready(self) -> bool:
        for path in self.folder.glob("*.ports"):
            try:
                url = str(json.loads(path.read_bytes())["nats"][0])
            except ValueError:
                return False  # partially written
            self._port = int(url.rpartition(":")[2])
            self.url = f"{'tls' if self._tls else 'nats'}://127.0.0.1:{self._port}"
            return True
        return False

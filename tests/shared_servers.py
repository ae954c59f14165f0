"""A release's shared servers on local ports, configured as in their pods."""

import asyncio
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import redis
from nats_servers import BINARY

from rlhfspec.messages import loop
from rlhfspec.messages.access.rights import inbox_of
from rlhfspec.operator.looking.cache import Cache
from rlhfspec.operator.shared.credentials import Keys, credentials_of, install_secrets, new_keys, operator_creds
from rlhfspec.operator.shared.leftovers import OpenRun, Runs
from rlhfspec.operator.shared.streams import Streams
from rlhfspec.runs.live import redis_users

CREATED = datetime(2026, 7, 1, 12, 0, tzinfo=UTC)
REDIS = shutil.which("redis-server")  # of the system: the package's Valkey has no TLS
NO_REDIS = "needs a redis-server with TLS in the PATH (apt-get install redis-server)"


class _Opening(Runs):
    def __init__(self, run: OpenRun) -> None:
        super().__init__(Cache(), set, lambda: True)
        self._run = run

    def to_declare(self) -> list[OpenRun]:
        return [self._run]


class SharedServers:
    """Context manager of one release's servers. `redis_url`: None where no Redis is installed."""

    def __init__(self, folder: Path, keys: Keys | None = None) -> None:
        self.folder = folder
        self.keys = keys or new_keys()
        self.secrets = install_secrets(self.keys, namespace="rlhf", release="rl", created=datetime.now(UTC))
        self.redis_url: str | None = None
        self._ending = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as failing:
            failing.callback(self._ending.close)
            self._start_nats()
            if REDIS is not None:
                self._start_redis()
            failing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def kill_nats(self) -> None:
        self._nats.kill()
        self._nats.wait()

    def start_nats(self) -> None:
        command = [BINARY, "-c", self.folder / "nats" / "nats.conf", "-a", "127.0.0.1", "-p", str(self._port)]
        command += ["-m", "-1", "-l", self.folder / "nats.log"]
        self._nats = self._program([str(part) for part in command], self._port)

    def kill_redis(self) -> None:
        self._redis.kill()
        self._redis.wait()

    def start_redis(self) -> None:
        self._redis = self._program([REDIS, str(self.folder / "redis" / "redis.conf")], self._redis_port)

    def open_run(
        self, run: str, *, job: str = "sums", namespace: str = "rl", stages: Collection[str] = loop.BY_NAME
    ) -> None:
        asyncio.run(self.make_streams(run, job=job, namespace=namespace, stages=stages))
        if self.redis_url is None:
            return
        master, known = self.keys.master, redis_users.ClusterRun(namespace, run)
        login = {"username": redis_users.OPERATOR, "password": redis_users.password_of(master, redis_users.OPERATOR)}
        with redis.Redis.from_url(self.redis_url, ssl_ca_data=self.keys.ca_pem.decode(), protocol=2, **login) as client:
            rules = redis_users.rules_of(master, known)
            client.execute_command("ACL SETUSER", redis_users.user_of(master, known), *rules)

    async def make_streams(
        self, run: str, *, job: str = "sums", namespace: str = "rl", stages: Collection[str] = loop.BY_NAME
    ) -> None:
        tls = ssl.create_default_context(cadata=self.keys.ca_pem.decode())
        install, inbox = redis_users.install_of(self.keys.master), inbox_of(redis_users.OPERATOR, "release")
        streams = Streams(self.nats_url, install, operator_creds(self.keys), inbox, tls)
        await streams.settle(_Opening(OpenRun(namespace, job, run, frozenset(stages))))

    def credentials(
        self, role: str, *, job: str = "sums", job_uid: str = "6f1c", run: str = "3f2a", namespace: str = "rl"
    ) -> Path:
        secret = credentials_of(
            self.keys, namespace=namespace, job=job, job_uid=job_uid, run=run, role=role, created=CREATED
        )
        return written(self.folder / "pods" / job_uid / run / role, secret)

    def release_credentials(self, name: str) -> Path:
        return written(self.folder / name, self.secrets[f"rl-{name}"])

    def _start_nats(self) -> None:
        self._port = free_port()
        place = self.release_credentials("nats")
        config = (place / "nats.conf").read_text()
        config = config.replace("/etc/nats", str(place)).replace('"/data"', f'"{self.folder / "store"}"')
        (place / "nats.conf").write_text(config)
        self.nats_url = f"tls://127.0.0.1:{self._port}"
        self.start_nats()

    def _start_redis(self) -> None:
        place, port = self.release_credentials("redis"), free_port()
        config = (place / "redis.conf").read_text().replace("/etc/redis", str(place)).replace("6379", str(port))
        (place / "redis.conf").write_text(f"{config}\nbind 127.0.0.1\nlogfile {self.folder / 'redis.log'}\n")
        self.redis_url = f"rediss://127.0.0.1:{port}"
        self._redis_port = port
        self.start_redis()

    def _program(self, command: list[str], port: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, cwd=self.folder)
        self._ending.callback(process.wait)
        self._ending.callback(process.kill)
        end = time.monotonic() + 30
        while True:
            assert process.poll() is None, command
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                return process
            except OSError:
                assert time.monotonic() < end, f"{command} does not listen"
                time.sleep(0.02)


def written(folder: Path, data: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in data.items():
        (folder / name).write_bytes(content)
    return folder


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as listening:
        return int(listening.getsockname()[1])

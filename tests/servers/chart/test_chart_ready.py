"""`helm test` passes for a NATS of the chart, and fails for one without authentication or TLS."""

import importlib.util
import ssl
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helm import CHART
from nats_servers import NatsServer
from shared_servers import written

from rlhfspec.operator.shared.credentials import install_secrets, new_keys

NATS_CONFIG = {"nats.conf", "tls.crt", "tls.key", "ca.pem"}


@pytest.fixture(scope="module")
def ready() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ready", CHART / "files" / "ready.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def secret() -> dict[str, bytes]:
    made = install_secrets(new_keys(), namespace="ml", release="localhost", created=datetime.now(UTC))
    assert set(made) == {f"localhost-{name}" for name in ("keys", "nats", "redis", "operator-tls", "dashboard")}
    assert "servers-ca.pem" in made["localhost-dashboard"], "what the test's pod mounts"
    assert set(made["localhost-nats"]) == NATS_CONFIG
    return made["localhost-nats"]


def nats(folder: Path, config: str) -> NatsServer:
    """Return a server with this configuration, but for ports and storage."""
    lines = [line for line in config.splitlines() if not line.startswith(("port:", "http_port:", "jetstream"))]
    return NatsServer(folder / "nats", "\n".join(lines))


def configured(folder: Path, secret: dict[str, bytes]) -> str:
    written(folder, secret)
    return secret["nats.conf"].decode().replace("/etc/nats", str(folder))


def tls(secret: dict[str, bytes]) -> ssl.SSLContext:
    """Return a context that checks only the authority: the certificate's name does not resolve here."""
    context = ssl.create_default_context(cadata=secret["ca.pem"].decode())
    context.check_hostname = False
    return context


def problem(ready: ModuleType, port: int, secret: dict[str, bytes]) -> str:
    said: Any = ready.problem_of(ready.nats_refuses, f"tls://127.0.0.1:{port}", tls(secret))
    return str(said)


def test_the_bundled_nats_refuses_strangers(ready: ModuleType, secret: dict[str, bytes], tmp_path: Path) -> None:
    with nats(tmp_path, configured(tmp_path, secret)) as server:
        assert problem(ready, server.port, secret) == ""


def test_a_nats_that_lets_strangers_in_is_noticed(
    ready: ModuleType, secret: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "DEADLINE_SECONDS", 5.0)
    config = configured(tmp_path, secret)
    with nats(tmp_path, config[: config.index("operator:")]) as server:
        assert "a client without credentials is answered with" in problem(ready, server.port, secret)


def test_a_nats_without_tls_is_noticed(
    ready: ModuleType, secret: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "DEADLINE_SECONDS", 5.0)
    with nats(tmp_path, "") as server:
        assert problem(ready, server.port, secret) == "it does not require TLS"


def test_a_server_that_is_away_is_named(ready: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "DEADLINE_SECONDS", 0.0)
    said = ready.problem_of(ready.redis_refuses, "rediss://127.0.0.1:1", ssl.create_default_context())
    assert said.startswith("ConnectionRefusedError")

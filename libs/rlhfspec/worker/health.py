"""Health servers of a process: gRPC's standard service, and HTTP for probes and Prometheus.

| request | answer |
|---|---|
| gRPC `grpc.health.v1.Health` | SERVING: ready, and all work is within its deadline |
| `/readyz` | the same over HTTP: 200, or 503 and the reason |
| `/healthz` | 200 while the event loop answers; 503: only a restart will help |
| `/metrics` | Prometheus metrics |

With credentials gRPC uses mutual TLS. HTTP is plain, as probes have no certificates, and on loopback by default.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer

from rlhfspec.messages.servers.credentials.certificates import server_credentials
from rlhfspec.stage.supervisor import is_overdue
from rlhfspec.stage.vitals import Vitals

LOOPBACK = "127.0.0.1"
BEAT_SECONDS = 10.0  # without a beat for this long the event loop hangs
_HEALTH_UPDATE_SECONDS = 1.0  # interval of updates to health watchers
_CALLS_GRACE_SECONDS = 1.0  # grace for calls in progress
_NUM_GRPC_THREADS = 16  # each streams to one peer at a time
HTTP_TIMEOUT_SECONDS = 5.0  # for a client to send its request

Metrics = Callable[[], str]


class Health:
    """gRPC and HTTP servers of one worker. `credentials`: folder with ca.pem, STAGE.pem and STAGE.key."""

    def __init__(
        self,
        stage: str,
        worker: int,
        vitals: Vitals,
        credentials: Path | None = None,
        *,
        host: str = LOOPBACK,
        http_port: int = 0,
        grpc_port: int = 0,
        metrics: Metrics = lambda: "",
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self._name = f"{stage} {worker}"
        self._vitals = vitals
        self._beat_seconds = beat_seconds
        self._not_ready = "is being built"
        self._last_beat = time.monotonic()
        self._grpc_health = _GrpcHealth(self.problem)
        pool = ThreadPoolExecutor(_NUM_GRPC_THREADS, thread_name_prefix=f"grpc-{stage}-{worker}")
        # Never share the port: another process that asks for any port must get its own.
        self.server: grpc.Server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        health_pb2_grpc.add_HealthServicer_to_server(self._grpc_health, self.server)
        place = f"[{host}]" if ":" in host else host
        self.grpc_address = f"{place}:{_add_port(self.server, f'{place}:{grpc_port}', credentials, stage)}"
        self._pool = pool
        self._http = _Http((host, http_port), self, metrics, self._grpc_health.tell)
        self.http_address = f"{place}:{self._http.server_address[1]}"

    def __enter__(self) -> Self:
        self.server.start()
        self._http.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()
        self._grpc_health.enter_graceful_shutdown()
        self.server.stop(_CALLS_GRACE_SECONDS).wait()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def beat(self) -> None:
        """Record that the event loop runs; to be called several times per `beat_seconds`."""
        self._last_beat = time.monotonic()

    async def keep_beating(self) -> None:
        """Call `beat` until cancelled. The sleeps also read the clock, as an AwakeClock requires."""
        while True:
            self.beat()
            await self._vitals.clock.sleep(BEAT_SECONDS / 10)

    def ready(self) -> None:
        self._not_ready = ""
        self._grpc_health.tell()

    def draining(self) -> None:
        self._not_ready = "is draining"
        self._grpc_health.tell()

    def hangs(self) -> str:
        quiet = time.monotonic() - self._last_beat
        return f"{self._name}: the event loop has not answered for {quiet:.0f} s" if quiet > self._beat_seconds else ""

    def problem(self) -> str:
        if self._not_ready:
            return f"{self._name} {self._not_ready}"
        return self.hangs() or self._overdue()

    def _overdue(self) -> str:
        for state in self._vitals.snapshot():
            if is_overdue(state):
                return (
                    f"{state.stage} {state.worker}: {state.what} takes {state.since_seconds:.0f} s, past its deadline"
                )
        return ""


def _add_port(server: grpc.Server, address: str, credentials: Path | None, role: str) -> int:
    if credentials is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, server_credentials(credentials, role)))


class _GrpcHealth(HealthServicer):  # type: ignore[misc]
    def __init__(self, problem: Callable[[], str]) -> None:
        super().__init__()
        self._problem = problem
        self.tell()

    def tell(self) -> None:
        status = health_pb2.HealthCheckResponse
        self.set("", status.NOT_SERVING if self._problem() else status.SERVING)

    def Check(self, request: Any, context: Any) -> Any:
        self.tell()
        return super().Check(request, context)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    timeout = _HEALTH_UPDATE_SECONDS

    def __init__(self, place: tuple[str, int], health: Health, metrics: Metrics, tell: Callable[[], None]) -> None:
        self.health = health
        self.metrics = metrics
        self._tell = tell
        self.address_family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        super().__init__(place, _Answer)
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_closing = True
        host, port = self.server_address[:2]
        with suppress(OSError), socket.create_connection((str(host), port), _HEALTH_UPDATE_SECONDS):
            """Nothing is asked: it only ends the wait for a request."""
        self._thread.join()
        self.server_close()

    def _serve(self) -> None:
        while not self._is_closing:
            self.handle_request()
            self._tell()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect or send invalid requests."""


class _Answer(BaseHTTPRequestHandler):
    server: _Http
    timeout = HTTP_TIMEOUT_SECONDS

    def do_GET(self) -> None:
        health = self.server.health
        if self.path == "/healthz":
            self._say_problem(health.hangs())
        elif self.path == "/readyz":
            self._say_problem(health.problem())
        elif self.path == "/metrics":
            self._say(200, self.server.metrics(), "text/plain; version=0.0.4; charset=utf-8")
        else:
            self._say(404, "not found; use /healthz, /readyz or /metrics\n")

    def _say_problem(self, problem: str) -> None:
        self._say(503 if problem else 200, f"{problem or 'ok'}\n")

    def _say(self, code: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, since probes come every few seconds."""

"""A job's pods as local processes, with a release's servers, a report endpoint and a storage."""

import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import warmed
import yaml
from shared_servers import SharedServers, free_port

from rlhfspec.cluster.report import Report
from rlhfspec.job import RLHFJob
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.loop import workers_of
from rlhfspec.messages.servers.guardian import MARK

UID = "c0e43711"
PATIENCE_SECONDS = 150.0


class Operator:
    """Report endpoint over TLS with a token; `answer` may be changed."""

    def __init__(self, servers: SharedServers) -> None:
        secret = servers.release_credentials("operator-tls")
        self.token, self.answer = "first", 200
        self.reports: list[Report] = []
        self.problems: list[str] = []
        self.news = threading.Condition()
        operator = self

        class Taking(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(operator.take(self.headers["Authorization"], body))
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Taking)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(secret / "tls.crt", secret / "tls.key")
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self._http.server_address[1]}/v1/namespaces/team/jobs/letters/report"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def take(self, authorization: str, body: bytes) -> int:
        with self.news:
            if authorization != f"Bearer {self.token}":
                self.problems.append(authorization)
                return 401
            if self.answer == 200:
                self.reports.append(Report.model_validate_json(body))
            self.news.notify_all()
            return self.answer

    def until(self, holds: Callable[[Report], Any], what: str) -> Report:
        """Wait for the first new report for which `holds` is true."""
        end = time.monotonic() + PATIENCE_SECONDS
        with self.news:
            seen = len(self.reports)
            while True:
                for report in self.reports[seen:]:
                    if holds(report):
                        return report
                seen = len(self.reports)
                left = end - time.monotonic()
                assert left > 0, f"no report of {what}; the last: {self.reports[-1:]} {self.problems[-1:]}"
                self.news.wait(left)

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class Job:
    def __init__(self, folder: Path, servers: SharedServers, job_file: Path) -> None:
        self.storage = job_file.parent
        self.run_folder = self.storage / "run"
        self._folder, self.servers = folder, servers
        self.operator = Operator(servers)
        self.token = folder / "token"
        self.token.write_text("first\n")
        self.job: dict[str, Any] = yaml.safe_load(job_file.read_text())
        self._is_open = False
        self.control_port = free_port()
        self._ending = ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        self.operator.close()

    def connections(self, role: str) -> Connections:
        name = self.job["metadata"]["name"]
        return Connections(
            uid=UID, job_file=self.run_folder / "processes" / "job.json", base_folder=self.storage,
            folder=self.run_folder, nats_url=self.servers.nats_url, redis_url=self.servers.redis_url,
            credentials=self.servers.credentials(role, job=name, run=UID), weights="grpc",
            report_url=self.operator.url if role == "control" else None,
            http_port=self.control_port if role == "control" else 0,
        )  # fmt: skip

    def mounted(self, role: str) -> Path:
        place = self._folder / role
        place.mkdir(exist_ok=True)
        (place / "connections.json").write_text(self.connections(role).model_dump_json())
        (place / "job.json").write_text(json.dumps(self.job))
        return place / "connections.json"

    def open(self) -> None:
        self._is_open = True
        stages = workers_of(RLHFJob.model_validate(self.job))
        self.servers.open_run(UID, job=self.job["metadata"]["name"], stages=stages)

    def start(self, role: str, worker: int | None = 0, *, opened: bool = True) -> subprocess.Popen[bytes]:
        if opened and not self._is_open:
            self.open()
        arguments = ["-m", f"rlhfspec.{role}", "--connections", str(self.mounted(role))]
        arguments += ["--token", str(self.token)] if role == "control" else []
        arguments += ["--worker", str(worker)] if role not in ("control", "prepare") else []
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TERMINATION_LOG": str(self.words(role))}
        with (self._folder / f"{role}.log").open("ab") as log:
            process = warmed.Popen([sys.executable, *arguments], env=environment, stderr=log)
        self._processes.append(process)
        return process

    def start_stages(self, *stages: str) -> subprocess.Popen[bytes]:
        """Start one worker per stage. The output names ended stages and their exit codes."""
        given = [f"{stage}={self.mounted(stage)}" for stage in stages]
        command = [sys.executable, str(Path(__file__).with_name("stage_forks.py")), *given]
        environment = os.environ | {"OMP_NUM_THREADS": "1", MARK: UID}
        with (self._folder / "stages.log").open("ab") as log:
            self._processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log))
        return self._processes[-1]

    def show(self, *how: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "rlhfspec.control.show", "--connections", str(self.mounted("control")), *how]
        self._processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        return self._processes[-1]

    def words(self, role: str) -> Path:
        return self._folder / f"{role}.words"

    def log(self, role: str) -> list[dict[str, Any]]:
        lines = (self._folder / f"{role}.log").read_text().splitlines()
        found = []
        for line in lines:
            with suppress(ValueError):
                found.append(json.loads(line))
        return found


def stopped(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(60)

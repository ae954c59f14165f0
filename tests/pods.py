"""A run's processes as pods: each with an address and credentials, without a supervisor."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import warmed
import yaml
from faults.processes import environment_of, of_run, send
from shared_servers import SharedServers

from rlhfspec.cluster import names
from rlhfspec.job import RLHFJob
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.loop import workers_of

PATIENCE_SECONDS = 150.0
JOB_UID = "6f1c-42"
OFF = {"mode": "off"}
STAGES = ("prompts", "generator", "reward", "reference", "trainer")  # that the job runs
# Their ports are fixed, so tests that run at the same time have addresses of their own.
NETWORK = f"127.0.{int(os.environ.get('PYTEST_XDIST_WORKER', 'gw0').removeprefix('gw')) + 1}"


@dataclass
class Pod:
    process: subprocess.Popen[bytes]
    place: Path
    host: str

    @property
    def message(self) -> str:
        return (self.place / "message").read_text()

    @property
    def log(self) -> str:
        return (self.place / "log").read_text()

    def ended(self) -> tuple[int, str]:
        self.process.wait(PATIENCE_SECONDS)
        return self.process.returncode, self.message

    def stopped(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        return self.ended()

    def killed(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Job:
    job_file: Path
    servers: SharedServers
    number: int = 1
    token: Path | None = None  # of control, for its reports
    pods: list[Pod] = field(default_factory=list)
    is_open: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods:
            pod.killed()
        for pid in of_run(self.uid):  # ranks of a pod that was killed; another test may have a run of this name
            if environment_of(pid).get("RLHFSPEC_HOST", "").startswith(f"{NETWORK}."):
                send(pid, signal.SIGKILL)

    @property
    def uid(self) -> str:
        return names.run_uid(JOB_UID, self.number)

    @property
    def folder(self) -> Path:
        return self.job_file.parent / "storage" / "run"

    def open(self) -> None:
        job = RLHFJob.model_validate(yaml.safe_load(self.job_file.read_text()))
        self.servers.open_run(self.uid, job=job.metadata.name, stages=workers_of(job))
        self.is_open = True

    def start(self, role: str, worker: int = 0, *, opened: bool = True, **connections: Any) -> Pod:
        if opened and not self.is_open:
            self.open()
        host = f"{NETWORK}.{len(self.pods) + 2}"
        place = self.job_file.parent / "pods" / f"{len(self.pods)}-{role}-{worker}"
        place.mkdir(parents=True)
        content = yaml.safe_load(self.job_file.read_text())
        (place / "job.json").write_text(json.dumps(content))
        (place / "connections.json").write_text(self._connections(role, content, connections).model_dump_json())
        arguments = ["--connections", str(place / "connections.json")]
        arguments += [] if role in (names.PREPARE, names.CONTROL) else ["--worker", str(worker)]
        arguments += ["--token", str(self.token)] if role == names.CONTROL and self.token else []
        environment = os.environ | {
            "RLHFSPEC_HOST": host, "RLHFSPEC_RUN": self.uid, "TERMINATION_LOG": str(place / "message"),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with (place / "log").open("wb") as log:
            process = warmed.Popen(
                [sys.executable, "-m", f"rlhfspec.{role}", *arguments], stdout=log, stderr=log, env=environment
            )
        self.pods.append(Pod(process, place, host))
        return self.pods[-1]

    def _connections(self, role: str, content: dict[str, Any], others: dict[str, Any]) -> Connections:
        name = content["metadata"]["name"]
        told: dict[str, Any] = {
            "uid": self.uid, "job_file": self.folder / "processes" / "job.json",
            "base_folder": self.job_file.parent, "folder": self.folder, "nats_url": self.servers.nats_url,
            "redis_url": self.servers.redis_url, "weights": "grpc", "folder_is_kept_by": "trainer",
            "credentials": self.servers.credentials(role, job=name, job_uid=JOB_UID, run=self.uid),
            "http_port": names.HTTP_PORT, "grpc_port": names.GRPC_PORT, "moves_port": names.MOVES_PORT,
            "link_port": names.LINK_PORT, "worker_host": names.WORKER_HOST,
        }  # fmt: skip
        return Connections(**(told | others))

"""Client of a benchmark process, which starts once and runs one repetition per request.

Example:
    >>> with Worker.start([sys.executable, "-c", "input(); print('{}')"], num_threads=1) as worker:
    ...     worker.ask("load")
    {}
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Any

# The same for every process: glibc otherwise returns large activations to the system after each operation,
# which makes forwards up to 1.7 times slower at random.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 31),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
RIVALS = Path(__file__).parent / "rivals"


class WorkerFailed(RuntimeError):
    """Raised when a worker replies with an error or dies; carries the end of its output."""


class Worker:
    def __init__(self, process: subprocess.Popen[str], log: IO[str], patience_seconds: float) -> None:
        self._process = process
        self._log = log
        self._patience_seconds = patience_seconds

    @classmethod
    def start(cls, command: list[str], *, num_threads: int, patience_seconds: float = 900.0) -> Worker:
        """Start a worker, which is killed if it takes longer than `patience_seconds` for a request."""
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115  it lives as long as the process
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | environment(num_threads),
            start_new_session=True,  # Ctrl-C reaches only the parent, which ends workers
        )
        return cls(process, log, patience_seconds)

    def ask(self, request: str, **arguments: Any) -> dict[str, Any]:
        """Send one request and wait for its reply."""
        deadline = threading.Timer(self._patience_seconds, self._process.kill)
        deadline.start()
        try:
            self.send(request, **arguments)
            return self.receive()
        finally:
            deadline.cancel()

    def send(self, request: str, **arguments: Any) -> None:
        """Send a request without waiting; a dead worker is noticed in `receive`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({request: arguments}), file=self._process.stdin, flush=True)

    def receive(self) -> dict[str, Any]:
        """Wait for the worker's next line and return its content; raises WorkerFailed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerFailed(f"the worker ended (exit code {self._process.wait()}):\n{self._log_tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(f"{answer['error']}\n{self._log_tail()}")
        return answer

    def close_input(self) -> None:
        """Close the input, which ends the worker once it is done; its last lines can still be received."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # requests unsent to a dead worker are lost
                self._process.stdin.close()

    def close(self) -> None:
        self.close_input()
        if self._process.stdout is not None:
            self._process.stdout.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _log_tail(self) -> str:
        self._log.flush()
        self._log.seek(0)
        return "".join(self._log.readlines()[-30:])


def environment(num_threads: int) -> dict[str, str]:
    """Return environment variables of a worker. Workers with the same thread count take turns on the same cores."""
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    return MALLOC | {
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def our_command() -> list[str]:
    return [sys.executable, "-m", "rlhfspec.bench.generating.ours"]


def hf_command() -> list[str]:
    return [sys.executable, "-m", "rlhfspec.bench.rivals.hf_worker"]


def vllm_engine_command(python: Path) -> list[str]:
    return [sys.executable, "-m", "rlhfspec.bench.generating.vllm_engine", str(python)]


def vllm_command(python: Path) -> list[str]:
    return [str(python), str(RIVALS / "vllm_worker.py")]

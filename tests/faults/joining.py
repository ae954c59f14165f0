"""A generator that joins a run by hand, through a proxy: works, is cut off, returns and leaves."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import warmed

from faults.harness import Disturbed, FaultyRun
from faults.proxy import Proxy
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.servers.guardian import MARK

NUMBER = 2  # the job has two of them
CUT_SECONDS = 5.0  # longer than it takes to notice, shorter than what it holds is given to others


class Joined:
    def __init__(self, run: FaultyRun, say: Callable[[str], None]) -> None:
        self._run = run
        self._say = say

    def visit(self) -> None:
        connections = self._run.connections()
        server = urlsplit(connections.nats_url)
        with Proxy(server.hostname or "", server.port or 0) as proxy, self._started(connections, proxy) as process:
            began = time.monotonic()
            self._until(process, lambda: self._num_made() > 0, "it makes a sample")
            self._say(f"made its first sample {time.monotonic() - began:.1f} s after it was started")
            proxy.cut()
            self._run.until(self._run.pause(CUT_SECONDS), "the time of the cut")
            proxy.heal()
            healed, made = time.monotonic(), self._num_made()
            self._until(process, lambda: self._num_made() > made, "it makes another sample")
            self._say(f"made another one {time.monotonic() - healed:.1f} s after it was healed")
            process.send_signal(signal.SIGTERM)
            asked = time.monotonic()
            self._run.until(lambda: process.poll() is not None, "it leaves")
            self._say(f"left {time.monotonic() - asked:.1f} s after it was asked to")
        if process.returncode != 0:
            raise Disturbed(f"it left with exit code {process.returncode}: {self._log.read_text()[-2000:]}")

    @contextmanager
    def _started(self, connections: Connections, proxy: Proxy) -> Iterator[subprocess.Popen[bytes]]:
        url = connections.nats_url.replace(str(urlsplit(connections.nats_url).port), str(proxy.port))
        file = self._run.out / "processes" / "by-hand.json"
        file.write_text(connections.model_copy(update={"nats_url": url}).model_dump_json())
        command = [sys.executable, "-m", "rlhfspec.generator", "--connections", str(file), "--worker", str(NUMBER)]
        environment = os.environ | {MARK: connections.uid}
        with self._log.open("wb") as log:
            process = warmed.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    @property
    def _log(self) -> Path:
        return self._run.out.with_suffix(".by-hand.log")

    def _num_made(self) -> int:
        file = self._run.out / "traces" / f"generator-{NUMBER}.jsonl"
        return file.read_bytes().count(b'"generation"') if file.exists() else 0

    def _until(self, process: subprocess.Popen[bytes], holds: Callable[[], bool], what: str) -> None:
        self._run.until(lambda: holds() or process.poll() is not None, what)
        if process.poll() is not None:
            raise Disturbed(f"it ended with exit code {process.returncode}: {self._log.read_text()[-2000:]}")

"""A run under faults: started by command, struck by a schedule, restarted when its supervisor dies."""

import heapq
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import warmed

from faults import processes
from faults.schedule import SUPERVISOR, Fault
from rlhfspec.cli.signals import STOPPED
from rlhfspec.messages.access.connections import Connections

LOOK_SECONDS = 0.02
GONE_SECONDS = 60.0  # nothing of a run is left after so long; 10 s on a quiet machine, which is printed
MOST_WORKERS = 3  # of a stage
QUIET_SECONDS = 240.0  # without a step, and without a fault: it hangs


class Disturbed(Exception):
    """Raised when a run under faults misbehaves."""


class FaultyRun:
    """A run under faults. `overrides`: as of `rlhfspec run --set`; `say` receives every fault."""

    def __init__(self, job: Path, out: Path, overrides: Sequence[str], say: Callable[[str], None]) -> None:
        self._command = [sys.executable, "-m", "rlhfspec.cli.start", "run", "--processes", str(job), "--out", str(out)]
        self._command += [word for override in overrides for word in ("--set", override)]
        self.out = out
        self._say = say
        self.quiet_seconds = QUIET_SECONDS
        self.environment: dict[str, str] = {}  # what its processes have beside this one's
        self._log = out.with_suffix(".log")
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._right_code = 0
        self._known: dict[str, Connections] = {}  # of each start
        self._held: list[tuple[float, int]] = []  # until when which process is held
        self.struck: Counter[str] = Counter()
        self.gone_seconds: list[float] = []  # after each death of the supervisor

    def wait_and_strike(self, fault: Fault) -> None:
        self._wait_for(fault)
        self._strike(fault)

    def strike_and_interrupt(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            self.wait_and_strike(fault)
        steps = self.num_steps
        self.until(lambda: self.num_steps > steps + 1, "it goes on")
        self.interrupt()

    @contextmanager
    def started(self) -> Iterator[None]:
        """Run until completed or interrupted. Raise `Disturbed` if it fails, hangs or leaves anything behind."""
        try:
            self._start()
            yield
            self._until(lambda: self._ended() is not None, "it ends")
            if self._ended() != self._right_code:
                raise Disturbed(f"it ended with exit code {self._ended()}:\n{self._last_words()}")
            self._until_gone()
        finally:
            self.clean_up()

    def interrupt(self) -> None:
        self._right_code = STOPPED
        self._supervisor.send_signal(signal.SIGINT)

    def connections(self) -> Connections:
        uid = self._uid()
        assert uid is not None, "it runs"
        return self._known[uid]

    def _start(self) -> None:
        resume = ["--resume"] if (self.out / "manifest.json").exists() else []
        with self._log.open("ab") as log:
            self._supervisor = warmed.Popen(
                [*self._command, *resume], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | self.environment,
            )  # fmt: skip

    def _ended(self) -> int | None:
        return self._supervisor.poll()

    @property
    def num_steps(self) -> int:
        with suppress(OSError):
            return (self.out / "steps.jsonl").read_bytes().count(b"\n")
        return 0

    def _uid(self) -> str | None:
        file = self.out / "processes" / "connections.json"
        with suppress(OSError, ValueError):
            connections = Connections.model_validate_json(file.read_bytes())
            self._known[connections.uid] = connections
            return connections.uid
        return None

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def _last_words(self) -> str:
        return self.said[-3000:]

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Wait for a condition. Raise `Disturbed` if the run ends first."""
        self._until(lambda: holds() or self._ended() is not None, what)
        if self._ended() is not None:
            raise Disturbed(f"it ended with exit code {self._ended()} before {what}:\n{self._last_words()}")

    def _until(self, holds: Callable[[], object], what: str) -> None:
        """Poll the condition and release held processes in time. Time counts from the last step."""
        steps, since = self.num_steps, time.monotonic()
        while not holds():
            self._uid()
            self._let_go(time.monotonic())
            time.sleep(LOOK_SECONDS)
            if self.num_steps != steps:
                steps, since = self.num_steps, time.monotonic()
            if time.monotonic() - since > self.quiet_seconds:
                raise Disturbed(f"never: {what}, and no step for {self.quiet_seconds:.0f} s:\n{self._last_words()}")

    def _wait_for(self, fault: Fault) -> None:
        self.until(lambda: self.num_steps >= fault.after_step, f"step {fault.after_step}")
        self.until(self.pause(fault.delay_seconds), str(fault))

    def pause(self, seconds: float) -> Callable[[], bool]:
        end = time.monotonic() + seconds
        return lambda: time.monotonic() >= end

    def _strike(self, fault: Fault) -> None:
        if fault.target == SUPERVISOR:
            self._kill_supervisor(fault)
            return
        found: list[int] = []

        def is_there() -> bool:
            uid = self._uid()
            found[:] = self._found(uid, fault.target) if uid else []
            return bool(found)

        self.until(is_there, f"there is a {fault.target}")
        self._send(fault, found)
        self._tell(fault, f"{len(found)} processes")

    def _send(self, fault: Fault, pids: Sequence[int]) -> None:
        number = {"kill": signal.SIGKILL, "hold": signal.SIGSTOP, "leave": signal.SIGTERM}[fault.kind]
        for pid in pids:
            if processes.send(pid, number) and fault.kind == "hold":
                heapq.heappush(self._held, (time.monotonic() + fault.seconds, pid))

    def _found(self, uid: str, target: str) -> list[int]:
        """Return the target's pids, or a colleague's if it is restarting or gone."""
        stage = target.rpartition("-")[0]
        colleagues = [f"{stage}-{number}" for number in range(MOST_WORKERS)] if stage else []
        return next((found for name in (target, *colleagues) if (found := processes.named(uid, name))), [])

    def _kill_supervisor(self, fault: Fault) -> None:
        self.until(lambda: self._uid() is not None, "it has begun")
        # Without any guardian the next start cleans up: faults/lives.py kills them together.
        self.until(lambda: processes.named(self._uid() or "", "guardian"), "there is a guardian")
        self._supervisor.kill()
        self._supervisor.wait()
        self._tell(fault, "and everything with it")
        self._until_gone()
        self._start()

    def _tell(self, fault: Fault, whom: str) -> None:
        self.struck[f"{fault.kind} {fault.target.rpartition('-')[0] or fault.target}"] += 1
        self._say(f"step {self.num_steps}: {fault.kind} {fault.target} ({whom})")

    def _let_go(self, now: float) -> None:
        while self._held and self._held[0][0] <= now:
            processes.send(heapq.heappop(self._held)[1], signal.SIGCONT)

    def _until_gone(self, seconds: float = GONE_SECONDS) -> None:
        began = time.monotonic()
        while left := self.left():
            self._let_go(float("inf"))
            if time.monotonic() - began > seconds:
                raise Disturbed(f"left behind: {', '.join(left)}")
            time.sleep(LOOK_SECONDS)
        self.gone_seconds.append(time.monotonic() - began)

    def left(self) -> list[str]:
        found = []
        for uid, connections in self._known.items():
            found += [f"process {pid}" for pid in processes.of_run(uid)]
            urls = [connections.nats_url, connections.redis_url]
            found += [url for url in urls if url and processes.is_listening(url)]
            found += [str(path) for path in Path("/dev/shm").glob(f"rlhfspec-{uid}*")]
        return found + [str(path) for path in [self.out / "processes"] if path.exists()]

    def clean_up(self) -> None:
        self._let_go(float("inf"))
        if self._supervisor is not None and self._supervisor.poll() is None:
            self._supervisor.kill()
            self._supervisor.wait()
            with suppress(Disturbed):
                self._until_gone()
        for uid in self._known:
            for pid in processes.of_run(uid):
                processes.send(pid, signal.SIGKILL)
            shutil.rmtree(f"/dev/shm/rlhfspec-{uid}", ignore_errors=True)

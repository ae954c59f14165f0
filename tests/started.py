"""A run of processes, started by the user's command, and a reward that holds it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import warmed
import yaml
from faults.processes import named, send
from runs import curve_of, samples_of

from rlhfspec.messages.servers.guardian import NUM_GUARDIANS

PATIENCE_SECONDS = 150.0
MOMENT_SECONDS = 0.005  # less than a sample takes anywhere
START = "rlhfspec.cli.start"


OFF = "generation.speculation.mode=off"


TWO = ("roles.generator.workers=2", "roles.reward.workers=2")


class Started:
    """A run in a folder beside the job. `before`: code executed first. `fresh`: in a new interpreter."""

    def __init__(
        self,
        job_file: Path,
        out: str,
        *overrides: str,
        resume: bool = False,
        before: str = "",
        fresh: bool = False,
        processes: bool = True,
        serve: bool = False,
    ) -> None:
        self.job_file, self.out, self.folder = job_file, out, job_file.parent / out
        sets = [word for override in (OFF, *overrides) for word in ("--set", override)]
        start = ["-c", f"{before}; from rlhfspec.cli.start import main; main()"] if before else ["-m", START]
        way = [*(["--processes"] if processes else []), *(["--serve", "0"] if serve else [])]
        command = [sys.executable, *start, "run", *way, str(job_file)]
        command += ["--out", str(self.folder), *sets, *(["--resume"] if resume else [])]
        popen = subprocess.Popen if fresh else warmed.Popen
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        self.lines: list[str] = []

    def until(self, said: str) -> str:
        for line in self.process.stdout:
            self.lines.append(line)
            if said in line:
                return line
        raise AssertionError(f"it ended and never said {said}: {''.join(self.lines)}")

    def until_step(self, step: int) -> None:
        path = self.folder / "steps.jsonl"

        def is_there() -> bool:
            assert self.process.poll() is None, self.process.communicate()[0]
            return path.exists() and path.read_text().count("\n") >= step

        eventually(is_there, f"step {step}")

    def ended(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=PATIENCE_SECONDS)
        text = "".join(self.lines) + output
        assert "Traceback" not in text, text
        return self.process.returncode, text

    def ends(self, code: int = 0) -> str:
        """Return the output once the run has ended with this exit code."""
        found, output = self.ended()
        assert found == code, output
        return output

    @property
    def connections(self) -> dict[str, Any]:
        return json.loads((self.folder / "processes" / "connections.json").read_text())

    def pid_of(self, stage: str, worker: int = 0) -> int:
        return named(self.connections["uid"], f"{stage}-{worker}")[0]

    def kill_unguarded(self) -> None:
        """Kill the supervisor and its guardians, so that nothing cleans up."""
        guardians = named(self.connections["uid"], "guardian")
        assert len(guardians) == NUM_GUARDIANS
        for pid in guardians:
            os.kill(pid, signal.SIGSTOP)
        for pid in (self.process.pid, *guardians):
            os.kill(pid, signal.SIGKILL)
        self.process.wait(PATIENCE_SECONDS)  # it holds the folder's lock until its memory is free

    def ranks(self) -> dict[int, int]:
        lines = map(json.loads, (self.folder / "logs" / "trainer-0.jsonl").read_text().splitlines())
        return {line["rank"]: line["pid"] for line in lines if "rank" in line and "pid" in line}

    def curve(self) -> list[dict[str, Any]]:
        return curve_of(self.job_file, self.out)

    def check_alike(self, curve: list[dict[str, Any]], out: str = "one") -> None:
        """Assert that it has the curve and the samples of another run."""
        assert self.curve() == curve
        assert samples_of(self.job_file, self.out) == samples_of(self.job_file, out)


def eventually(condition: Callable[[], Any], what: str | Callable[[], str]) -> Any:
    end = time.monotonic() + PATIENCE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < end, f"never: {what if isinstance(what, str) else what()}"
        time.sleep(0.02)
    return found


def caught(
    pids: Sequence[int],
    condition: Callable[[], Any],
    what: str,
    *,
    moment_seconds: float = MOMENT_SECONDS,
    still_seconds: float = 0.0,
) -> Any:
    """Return the condition's value with these processes stopped. Between two polls they run only briefly."""

    def look() -> Any:
        for pid in pids:
            send(pid, signal.SIGCONT)
        time.sleep(moment_seconds)
        for pid in pids:
            send(pid, signal.SIGSTOP)
        time.sleep(still_seconds)
        return condition()

    return eventually(look, what)


HOLD = """
import pathlib, time

def is_held(hold):
    try:
        num_steps, _, out = hold.read_text().partition(" ")
    except FileNotFoundError:
        return False
    folder = hold.parent / out
    steps = folder / "steps.jsonl"
    num_trained = steps.read_text().count("\\n") if steps.exists() else 0
    return not num_steps or (folder.exists() and num_trained >= int(num_steps))

def letters(completion):
    while is_held(pathlib.Path(__file__).with_name("hold")):
        time.sleep(0.05)
    return sum(character.isascii() and character.isalpha() for character in completion) / 8
"""


def hold_rewards(job_file: Path, after: str = "") -> Path:
    """Hold all scoring while the returned file exists, so that no step ends.

    `after` is written into it: `2 many` holds only the run in the folder `many`, after its second or third step."""
    (job_file.parent / "rewards.py").write_text(HOLD)
    job = yaml.safe_load(job_file.read_text())
    job["spec"]["rewards"]["sources"][0]["timeoutSeconds"] = PATIENCE_SECONDS
    job_file.write_text(yaml.safe_dump(job))
    file = job_file.parent / "hold"
    file.write_text(after)
    return file


STOP = """
import os, signal
from rlhfspec.cli.progress import StatusLine
say = StatusLine.__call__
def say_and_stop(line, message):
    say(line, message)
    if SAID in message:
        os.kill(os.getpid(), signal.SIGSTOP)
StatusLine.__call__ = say_and_stop
"""


def stopping_at(said: str) -> str:
    return f"exec({STOP!r}, {{'SAID': {said!r}}})"

"""A run of processes, started by the command that a user gives, and a reward that holds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import warmed
import yaml
from faults.processes import named
from runs import curve_of

PATIENCE_SECONDS = 150.0
START = "rlhfspec.cli.start"


OFF = "generation.speculation.mode=off"


TWO = ("roles.generator.workers=2", "roles.reward.workers=2")


class Started:
    """A run with processes, in a folder beside the job. `before`: what the interpreter does first. `fresh`: that is a
    new one, as a shell starts it; else it has imported torch before (`warmed`)."""

    def __init__(
        self,
        job_file: Path,
        out: str,
        *overrides: str,
        resume: bool = False,
        options: Sequence[str] = (),
        before: str = "",
        fresh: bool = False,
    ) -> None:
        self.job_file, self.out, self.folder = job_file, out, job_file.parent / out
        sets = [word for override in (OFF, *overrides) for word in ("--set", override)]
        start = ["-c", f"{before}; from rlhfspec.cli.start import main; main()"] if before else ["-m", START]
        command = [sys.executable, *start, "run", "--processes", str(job_file), *options]
        command += ["--out", str(self.folder), *sets, *(["--resume"] if resume else [])]
        popen = subprocess.Popen if fresh else warmed.Popen
        self.process = popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.lines: list[str] = []

    def until(self, said: str) -> str:
        """The line that says it; the run must not end before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if said in line:
                return line
        raise AssertionError(f"it ended and never said {said}: {''.join(self.lines)}")

    def ended(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=PATIENCE_SECONDS)
        text = "".join(self.lines) + output
        assert "Traceback" not in text, text
        return self.process.returncode, text

    @property
    def connections(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "processes" / "connections.json").read_text())
        return content

    def pid_of(self, stage: str, worker: int = 0) -> int:
        """Of a worker's process, as the system has it."""
        return named(self.connections["uid"], f"{stage}-{worker}")[0]

    def ranks(self) -> dict[int, int]:
        """Return processes of the trainer's newest set by rank."""
        lines = map(json.loads, (self.folder / "logs" / "trainer-0.jsonl").read_text().splitlines())
        return {line["rank"]: line["pid"] for line in lines if "rank" in line and "pid" in line}

    def curve(self) -> list[dict[str, Any]]:
        return curve_of(self.job_file, self.out)


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """What it found."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.02)
    return found


HOLD = """
import pathlib, time

def letters(completion):
    while pathlib.Path(__file__).with_name("hold").exists():
        time.sleep(0.05)
    return sum(character.isascii() and character.isalpha() for character in completion) / 8
"""


def hold_rewards(job_file: Path) -> Path:
    """While the file that is returned is there nothing is scored, so that no step ends."""
    (job_file.parent / "rewards.py").write_text(HOLD)
    job = yaml.safe_load(job_file.read_text())
    job["spec"]["rewards"]["sources"][0]["timeoutSeconds"] = PATIENCE_SECONDS
    job_file.write_text(yaml.safe_dump(job))
    file = job_file.parent / "hold"
    file.touch()
    return file

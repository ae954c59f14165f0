"""Measure the memory and idle CPU of a run: python bench/footprint.py JOB [--set PATH=VALUE ...] [--idle SECONDS].

Runs `rlhfspec run JOB` in one process and with --processes, and sums the memory (PSS) of all its processes. With
--idle, a reward blocks once for that long, and the share of a core used meanwhile is printed. Linux only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

WAYS = {"one process": (), "processes": ("--processes",)}
LOOK_SECONDS = 1.0
SETTLE_SECONDS = 5.0  # at each end of an idle period, until work is done
HOLDING = """
import os, time

def held(completion):
    path = os.environ["FOOTPRINT_HELD"]
    if not os.path.exists(path):
        open(path, "w").close()
        time.sleep(float(os.environ["FOOTPRINT_IDLE"]))
    return float(len(completion))
"""


def descendants(root: int) -> list[int]:
    """Return the ids of a process and all its descendants."""
    children = defaultdict(list)
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):
            children[int(_stat(pid)[1])].append(pid)
    found, coming = [], [root]
    while coming:
        found.append(coming.pop())
        coming += children[found[-1]]
    return found


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def name_of(pid: int) -> str:
    with suppress(OSError):
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        for pair in environ:
            if pair.startswith(b"RLHFSPEC_WORKER="):
                return pair.partition(b"=")[2].decode().rstrip(".")
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        return next((word for word in map(os.path.basename, words) if not word.startswith("python")), "?")
    return "?"


def pss_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def cpu_by_name(pids: list[int]) -> dict[str, float]:
    """Return the CPU seconds of the processes, summed by name."""
    by_name: dict[str, float] = defaultdict(float)
    for pid in pids:
        with suppress(OSError):
            by_name[name_of(pid)] += sum(map(int, _stat(pid)[11:13])) / os.sysconf("SC_CLK_TCK")
    return by_name


def memory_by_name(pids: list[int]) -> dict[str, int]:
    by_name: dict[str, int] = defaultdict(int)
    for pid in pids:
        by_name[name_of(pid)] += pss_bytes(pid)
    return dict(by_name)


class Watched:
    """Run whose memory is sampled until it ends."""

    def __init__(self, command: list[str], held: Path, idle: float) -> None:
        self.samples: list[dict[str, int]] = []  # bytes by name
        self.idle_shares: dict[str, float] = {}  # of a core, by name
        self.idle_memory: dict[str, int] = {}
        began = time.monotonic()
        told = {"FOOTPRINT_HELD": str(held), "FOOTPRINT_IDLE": str(idle), "PYTHONPATH": str(held.parent)}
        process = subprocess.Popen(command, env=os.environ | told, stdout=subprocess.DEVNULL)
        for pids in self._looks(process):
            self.samples.append(memory_by_name(pids))
            if idle and held.exists() and not self.idle_shares:
                self._watch_idle(pids, idle)
        self.seconds = time.monotonic() - began
        self.code = process.returncode

    def _looks(self, process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
        while process.poll() is None:
            yield descendants(process.pid)
            time.sleep(LOOK_SECONDS)

    def _watch_idle(self, pids: list[int], idle: float) -> None:
        time.sleep(SETTLE_SECONDS)
        before, began = cpu_by_name(pids), time.monotonic()
        time.sleep(max(idle - 2 * SETTLE_SECONDS, 1.0))
        after, seconds = cpu_by_name(pids), time.monotonic() - began
        self.idle_shares = {name: (after[name] - spent) / seconds for name, spent in before.items()}
        self.idle_memory = memory_by_name(pids)

    @property
    def peak(self) -> dict[str, int]:
        return max(self.samples, key=lambda sample: sum(sample.values()))

    @property
    def median_bytes(self) -> float:
        return statistics.median(sum(sample.values()) for sample in self.samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--idle", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    given = parser.parse_args()
    for way in given.ways:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "footprint_rewards.py").write_text(HOLDING)
            sets = [word for each in given.set for word in ("--set", each)]
            if given.idle:
                source = '[{"type": "function", "function": "footprint_rewards:held"}]'
                sets += ["--set", f"rewards.sources={source}"]
            rlhfspec = str(Path(sys.executable).with_name("rlhfspec"))
            out = str(Path(folder) / "out")
            command = [rlhfspec, "run", *WAYS[way], str(given.job), *sets, "--out", out]
            run = Watched(command, Path(folder) / "held", given.idle)
        print(f"{way}: exit code {run.code}, {run.seconds:.1f} s, memory (PSS) at most "
              f"{sum(run.peak.values()) / 1e6:.0f} MB, median {run.median_bytes / 1e6:.0f} MB")  # fmt: skip
        for name, size in sorted((run.idle_memory or run.peak).items(), key=lambda each: -each[1]):
            idle = f"  {100 * run.idle_shares.get(name, 0.0):4.1f}%" if run.idle_shares else ""
            print(f"    {size / 1e6:7.1f} MB{idle}  {name}")
        if run.idle_shares:
            share = 100 * sum(run.idle_shares.values())
            print(f"    {sum(run.idle_memory.values()) / 1e6:.0f} MB and {share:.1f}% of a core "
                  "while all wait", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

"""Run all checks that need a GPU: python bench/gpu_day.py --minutes 9 [--only kernels --only engine].

Each part is a process with a deadline, so one that fails, hangs or kills its CUDA context cannot stop another. Each
result is a line of JSON, written at once, with what a data-centre GPU should reach. Nothing is downloaded.

--device second (of tests/second_device) or cpu runs tiny versions to test the script; their figures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

from gpu_parts.measure import Day, Found

# Parts in order, with the share of the time that each may take.
PARTS = {
    "environment": 1, "twins": 2, "law": 3, "waits": 2, "kernels": 4, "few_bits": 3, "engine": 4, "training": 4,
    "scorers": 2, "ranks": 2, "weights": 2, "loop": 4, "vllm": 6,
}  # fmt: skip
ROOMS = {
    "environment": "correct", "twins": "correct", "law": "correct", "waits": "correct", "kernels": "kernels",
    "few_bits": "few_bits", "engine": "speed", "scorers": "speed", "training": "training", "ranks": "training",
    "weights": "weights", "loop": "training", "vllm": "vllm",
}  # fmt: skip
LEAST_SECONDS = 30.0
LAST_WORDS = 600  # characters of a failed part's traceback


def run_part(name: str, day: Day) -> None:
    """Run a part and write its results."""
    try:
        getattr(import_module(f"gpu_parts.{ROOMS[name]}"), name)(day)
    except Exception:
        day.write({"part": name, "error": traceback.format_exc(limit=-4)[-LAST_WORDS:]})


def run_all(names: list[str], day: Day, minutes: float) -> None:
    """Run the parts in turn, each in a process that is killed when its share of the time is over."""
    last = time.monotonic() + minutes * 60
    for place, name in enumerate(names):
        left = last - time.monotonic()
        share = left * PARTS[name] / sum(PARTS[each] for each in names[place:])
        command = [sys.executable, __file__, "--part", name, "--device", str(day.device), "--out", str(day.out)]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            code = process.wait(timeout=max(share, LEAST_SECONDS))
            if code:
                day.write({"part": name, "error": f"ended with exit code {code}"})
        except subprocess.TimeoutExpired:
            day.write({"part": name, "error": "its time was over"})
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", action="append", choices=list(PARTS), help="this part alone; may be repeated")
    parser.add_argument("--device", default="cuda", help="cuda, second or cpu")
    parser.add_argument("--out", type=Path, default=Path("gpu_day.jsonl"), help="results are added to this file")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    day = Day.on(given.device, given.out)
    if given.part:
        run_part(given.part, day)
        return
    before = len(day.results())
    run_all(given.only or list(PARTS), day, given.minutes)
    results = day.results()[before:]
    failed = sum("error" in result for result in results)
    missed = sum("error" not in result and Found(**result).is_met is False for result in results)
    print(f"{len(results)} results in {given.out}: {failed} failed, {missed} not as expected")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

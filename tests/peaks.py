"""Peak memory of a piece of work in this process."""

from collections.abc import Callable
from pathlib import Path


def peak_above(work: Callable[[], object]) -> int:
    def resident(which: str) -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(next(line for line in status.splitlines() if line.startswith(which)).split()[1])

    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before

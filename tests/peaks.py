"""Peak memory of a piece of work in this process."""

import ctypes
from collections.abc import Callable
from pathlib import Path

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # M_* of <malloc.h>


def peak_above(work: Callable[[], object]) -> int:
    """Return by how many bytes the work raised this process's memory, without what malloc keeps of freed memory."""

    def resident(which: str) -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(next(line for line in status.splitlines() if line.startswith(which)).split()[1])

    libc = ctypes.CDLL(None)
    for option, value in ((TRIM_THRESHOLD, 1 << 17), (TOP_PAD, 0), (MMAP_THRESHOLD, 1 << 17)):
        assert libc.mallopt(option, value)
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before

"""The settings of glibc's allocator. Nothing here imports torch: they count for what is allocated after them."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # M_* of <malloc.h>


def tune_malloc() -> bool:
    """Makes glibc keep freed memory, in one place. True when it took the settings, False where there is no glibc.

    By default it returns every large activation to the system after each operation, and a forward pass spends up to
    1.7x its time on page faults. With an arena for each thread, what one thread frees is no room for another: the
    trainer's step at 77M parameters took 27.3 s instead of 22.1 s. Said before the first thread starts, since an arena
    that is there stays.
    """
    settings = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, (1 << 31) - 1), (_TOP_PAD, 256 << 20))
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    results = [mallopt(option, value) for option, value in settings]  # all of them, even if one is refused
    return all(result == 1 for result in results)

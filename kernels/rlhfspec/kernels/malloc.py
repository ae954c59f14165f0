"""Settings of glibc's allocator. They affect only later allocations, so this module must not import torch."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # M_* of <malloc.h>


def tune_malloc() -> bool:
    """Make glibc keep freed memory in one arena, to avoid page faults. Call it before any thread starts."""
    settings = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, (1 << 31) - 1), (_TOP_PAD, 256 << 20))
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    results = [mallopt(option, value) for option, value in settings]  # apply all of them, even if one is refused
    return all(result == 1 for result in results)

"""Settings of glibc's allocator. This module must not import torch, because they apply only to later allocations."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # M_* of <malloc.h>


def tune_malloc() -> bool:
    """Make glibc keep freed memory in one arena, which avoids page faults in forward passes. Return False without
    glibc. Call it before the first thread starts, because an existing arena stays."""
    settings = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, (1 << 31) - 1), (_TOP_PAD, 256 << 20))
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    results = [mallopt(option, value) for option, value in settings]  # apply all of them, even if one is refused
    return all(result == 1 for result in results)

"""Memory for versions, used again: pages that were never touched cost as much as hashing what is written to them."""

from __future__ import annotations

import mmap
import sys
import threading

import torch
from torch import Tensor

_MINE = 3  # references to memory that nobody uses: the list's, the loop's, and getrefcount's own


class Buffers:
    """A buffer is free again once no tensor looks at it, not even one that a caller of `get` still holds.

    Example:
        >>> buffers = Buffers()
        >>> first = buffers.take(8)
        >>> look, address = first[:4], first.data_ptr()
        >>> del first
        >>> buffers.take(8).data_ptr() == address
        False
        >>> del look
        >>> buffers.take(8).data_ptr() == address
        True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[mmap.mmap] = []

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], whatever is in it. Those that are free and of another size are given back."""
        size = max(num_bytes, 1)
        with self._lock:
            used: list[mmap.mmap] = []
            free: list[mmap.mmap] = []
            for memory in self._all:
                (free if sys.getrefcount(memory) == _MINE else used).append(memory)
            found = next((memory for memory in free if len(memory) == size), None)
            if found is None:
                found = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._all = [*used, found]
            return torch.frombuffer(found, dtype=torch.uint8)[:num_bytes]

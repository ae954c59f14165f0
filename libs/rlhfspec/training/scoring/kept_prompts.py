"""LRU cache of prompts in a scorer's KV blocks, shared by each prompt's responses."""

from __future__ import annotations

import numpy as np

from rlhfspec.common.arrays import IntArray

LEAST_TOKENS = 64  # a shorter prompt is run with its answer, as an extra forward costs more than it saves


class KeptPrompts:
    """Prompt cache. Callers `take` blocks, then `keep` a prompt in them or `give_back` the blocks."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: list[int] = []
        self._blocks: dict[bytes, list[int]] = {}  # by the prompt's tokens, the most recently used last
        self.clear()

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        self._blocks.clear()
        self._free = list(range(self.num_blocks - 1, -1, -1))

    def find(self, prompt: IntArray) -> list[int] | None:
        key = prompt.tobytes()
        blocks = self._blocks.pop(key, None)
        if blocks is not None:
            self._blocks[key] = blocks
        return blocks

    def keep(self, prompt: IntArray, blocks: list[int]) -> None:
        self._blocks[prompt.tobytes()] = blocks

    def count(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def take(self, num_tokens: int) -> list[int]:
        """Allocate blocks for `num_tokens`, evicting least recently used prompts."""
        count = self.count(num_tokens)
        while len(self._free) < count:
            assert self._blocks, f"{count} blocks of {self.num_blocks} are wanted, and the others are taken"
            oldest = next(iter(self._blocks))
            self.give_back(self._blocks.pop(oldest))
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        self._free += reversed(blocks)

    def slots(self, blocks: list[int]) -> IntArray:
        offsets = np.arange(self.block_size, dtype=np.int32)
        return (np.asarray(blocks, np.int32)[:, None] * self.block_size + offsets).ravel()

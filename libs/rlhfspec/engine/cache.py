"""Paged KV memory addressed by the token: who owns which block, and which slot holds which position.

Blocks are the unit of allocation, sharing and transfer; slots (one token's place in a block) are the unit
of addressing. A row's slot table lists the slots of its positions, then its free slots:

    slot_table[row] = [ slot of position 0, 1, ..., length-1 | free slots of owned blocks ... ]

Tree nodes are written into the free slots. Keeping an accepted branch swaps table entries; nothing is copied.
Whole prompt blocks are shared by reference count between the samples of a prompt.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch

from rlhfspec.arrays import IntArray


@dataclass(slots=True)
class BlockPool:
    """Reference-counted blocks and the registry of shareable prompt blocks.

    >>> pool = BlockPool(num_blocks=4, block_size=16)
    >>> mine = pool.allocate(3)
    >>> pool.num_free
    1
    >>> pool.release(mine), pool.num_free
    ([0, 1, 2], 4)
    """

    num_blocks: int
    block_size: int
    free: list[int] = field(default_factory=list)
    references: IntArray = field(init=False)
    shared: dict[bytes, int] = field(default_factory=dict)  # prefix hash -> whole prompt block; KVSpace: filled yet?
    hash_of: dict[int, bytes] = field(default_factory=dict)  # block -> prefix hash

    def __post_init__(self) -> None:
        self.free = list(range(self.num_blocks - 1, -1, -1))
        self.references = np.zeros(self.num_blocks, np.int32)

    @property
    def num_free(self) -> int:
        return len(self.free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        assert count <= len(self.free), "the scheduler allocates only what it saw free"
        blocks = [self.free.pop() for _ in range(count)]
        self.references[blocks] = 1
        return blocks

    def retain(self, blocks: list[int]) -> None:
        self.references[blocks] += 1

    def release(self, blocks: list[int]) -> list[int]:
        """Those of the blocks that nobody owns any more."""
        freed = []
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free.append(block)
                freed.append(block)
                prefix_hash = self.hash_of.pop(block, None)
                if prefix_hash is not None:
                    del self.shared[prefix_hash]
        return freed

    def prefix_hashes(self, tokens: tuple[int, ...]) -> list[bytes]:
        """One chained hash for every whole block of `tokens`; the last token always stays outside,
        because it has to be run through the model to get the first logits."""
        hashes: list[bytes] = []
        previous = b""
        data = np.asarray(tokens, np.int32)
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            block = data[start : start + self.block_size].tobytes()
            previous = hashlib.blake2b(previous + block, digest_size=16).digest()
            hashes.append(previous)
        return hashes

    def register(self, prefix_hash: bytes, block: int) -> None:
        if prefix_hash not in self.shared:
            self.shared[prefix_hash] = block
            self.hash_of[block] = prefix_hash


class SlotTable:
    """Position -> slot for every row of the engine, with the permutation of free slots behind it."""

    def __init__(self, num_rows: int, width: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: IntArray = np.zeros((num_rows, width), np.int32)
        self.capacity: IntArray = np.zeros(num_rows, np.int32)  # slots owned by the row
        self._offsets = np.arange(block_size, dtype=np.int32)

    def append(self, row: int, blocks: list[int]) -> None:
        start = int(self.capacity[row])
        new = (np.asarray(blocks, np.int32)[:, None] * self.block_size + self._offsets).ravel()
        self.slots[row, start : start + len(new)] = new
        self.capacity[row] = start + len(new)

    def clear(self, row: int) -> None:
        self.capacity[row] = 0

    def keep_path(self, rows: IntArray, position: IntArray, held_at: IntArray) -> None:
        """Make `position[i]` of `rows[i]` the slot that `held_at[i]` holds, by swapping the two entries.

        Called level by level (shallow first); `held_at >= position`, at most one entry per row and call.
        """
        kept = self.slots[rows, held_at]
        self.slots[rows, held_at] = self.slots[rows, position]
        self.slots[rows, position] = kept


def new_kv(*, num_blocks: int, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int,
           dtype: torch.dtype, device: torch.device) -> torch.Tensor:  # fmt: skip
    """One tensor for all layers, blocks first, so that a block is contiguous and travels in one piece.

    Returns [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].
    """
    shape = (num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


def check_blocks(pool: BlockPool, owned: list[list[int]]) -> None:
    """Free plus owned is everything, and every reference is accounted for. AssertionError names what is off."""
    references = np.zeros(pool.num_blocks, np.int32)
    for blocks in owned:
        assert len(set(blocks)) == len(blocks), f"a row owns a block twice: {blocks}"
        references[blocks] += 1
    wrong = np.flatnonzero(references != pool.references)
    assert len(wrong) == 0, f"reference counts differ at blocks {wrong[:8].tolist()}"
    assert len(set(pool.free)) == len(pool.free), "a block is free twice"
    assert int((references > 0).sum()) + len(pool.free) == pool.num_blocks, "blocks leaked"
    assert not references[pool.free].any(), "a free block is owned"
    assert all(references[block] > 0 for block in pool.hash_of), "a shared block is not owned by anyone"


def check_slots(table: SlotTable, row: int, blocks: list[int]) -> None:
    """A row's table is a permutation of exactly the slots of its blocks."""
    size = table.block_size
    expected = sorted(block * size + offset for block in blocks for offset in range(size))
    have = sorted(table.slots[row, : table.capacity[row]].tolist())
    assert have == expected, f"row {row}: slot table is not a permutation of its blocks' slots"

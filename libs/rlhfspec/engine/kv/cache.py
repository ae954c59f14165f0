"""Paged KV cache addressed by token.

A block holds `block_size` slots, one per token. A row's slot table lists its positions, then its free slots:

    slot_table[row] = [ slot of position 0, 1, ..., length-1 | free slots of owned blocks ... ]

Tree nodes are written into free slots. Keeping an accepted branch swaps table entries, without copying KV.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import mmap
import sys
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rlhfspec.common.arrays import BoolArray, IntArray


@dataclass(frozen=True, slots=True)
class Prefix:
    """Prompt tokens that samples can share: all but the last, which must run for the first logits."""

    hashes: tuple[bytes, ...]  # one per whole block, each over all tokens up to its end
    tail_hash: bytes  # of the tokens after the last whole block; empty if there are none
    num_tail: int
    num_tokens: int

    @classmethod
    def of(cls, tokens: tuple[int, ...], block_size: int) -> Prefix:
        """Hash all but the last prompt token by block.

        >>> prefix = Prefix.of(tuple(range(40)), block_size=16)
        >>> len(prefix.hashes), prefix.num_tail, prefix.num_tokens
        (2, 7, 39)
        """
        num_tokens = len(tokens) - 1
        data = np.asarray(tokens[:num_tokens], np.int32)
        previous, hashes = b"", []
        for start in range(0, num_tokens, block_size):
            part = data[start : start + block_size].tobytes()
            previous = hashlib.blake2b(previous + part, digest_size=16).digest()
            hashes.append(previous)
        num_tail = num_tokens % block_size
        tail_hash = hashes.pop() if num_tail else b""
        return cls(tuple(hashes), tail_hash, num_tail, num_tokens)


@dataclass(slots=True)
class BlockPool:
    """Pool of reference-counted blocks. Unowned prompt blocks are kept for reuse until no other is free (LRU)."""

    num_blocks: int
    block_size: int
    free: list[int] = field(default_factory=list)  # without content; the last one is allocated first
    kept: dict[int, None] = field(default_factory=dict)  # with a prompt; the first one is allocated first
    references: IntArray = field(init=False)
    shared: dict[bytes, int] = field(default_factory=dict)  # hash of a prompt's part -> block, filled or not
    hash_of: dict[int, bytes] = field(default_factory=dict)  # the inverse
    num_touched: int = 0  # blocks below this one were allocated since `forget`
    keeps: bool = True  # False in tests: a prompt is forgotten with its last owner

    def __post_init__(self) -> None:
        self.free = list(range(self.num_blocks - 1, -1, -1))
        self.references = np.zeros(self.num_blocks, np.int32)

    @property
    def num_free(self) -> int:
        return len(self.free) + len(self.kept)

    def num_kept(self, blocks: list[int]) -> int:
        return sum(block in self.kept for block in blocks)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        assert count <= self.num_free, "the scheduler allocates only what it saw free"
        blocks = [self.free.pop() if self.free else self._give_up() for _ in range(count)]
        self.references[blocks] = 1
        self.num_touched = max((self.num_touched, *(block + 1 for block in blocks)))
        return blocks

    def retain(self, blocks: list[int]) -> None:
        self.references[blocks] += 1
        for block in blocks:
            self.kept.pop(block, None)

    def touch(self, block: int) -> None:
        if block in self.kept:
            del self.kept[block]
            self.kept[block] = None

    def release(self, blocks: list[int], filled: BoolArray) -> None:
        """Release a sequence's blocks, last first; `filled` [num_blocks] marks valid KV."""
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                if self.keeps and block in self.hash_of and filled[block]:
                    self.kept[block] = None
                else:
                    self._unregister(block)
                    self.free.append(block)

    def register(self, prefix_hash: bytes, block: int) -> None:
        if prefix_hash not in self.shared:
            self.shared[prefix_hash] = block
            self.hash_of[block] = prefix_hash

    def forget(self) -> None:
        assert not self.references.any(), "somebody owns a block"
        self.shared.clear()
        self.hash_of.clear()
        self.kept.clear()
        self.free = list(range(self.num_blocks - 1, -1, -1))
        self.num_touched = 0

    def forget_kept(self) -> None:
        while self.kept:
            self.free.append(self._give_up())

    def _give_up(self) -> int:
        block = next(iter(self.kept))
        del self.kept[block]
        self._unregister(block)
        return block

    def _unregister(self, block: int) -> None:
        prefix_hash = self.hash_of.pop(block, None)
        if prefix_hash is not None:
            del self.shared[prefix_hash]


class SlotTable:
    def __init__(self, num_rows: int, width: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: IntArray = np.zeros((num_rows, width), np.int32)
        self.capacity: IntArray = np.zeros(num_rows, np.int32)  # slots owned by the row
        self._offsets = np.arange(block_size, dtype=np.int32)
        self._changed: list[npt.NDArray[np.int64]] | None = (
            None  # changed places in the flat table, once a copy elsewhere is kept
        )

    def append(self, row: int, blocks: list[int]) -> None:
        start = int(self.capacity[row])
        new = (np.asarray(blocks, np.int32)[:, None] * self.block_size + self._offsets).ravel()
        self._put(row, start, new)

    def hold(self, row: int, slots: IntArray) -> None:
        self._put(row, 0, slots)

    def _put(self, row: int, start: int, slots: IntArray) -> None:
        self.slots[row, start : start + len(slots)] = slots
        self.capacity[row] = start + len(slots)
        if self._changed is not None:
            self._changed.append(row * self.slots.shape[1] + np.arange(start, start + len(slots)))

    def clear(self, row: int) -> None:
        self.capacity[row] = 0

    def keep_path(self, rows: IntArray, position: IntArray, held_at: IntArray) -> None:
        """Swap the slots at `position[i]` and `held_at[i]` of `rows[i]`, to move accepted KV to its position.

        `held_at[i] >= position[i]`. Rows are distinct; call it once per tree level, from the root down.
        """
        kept = self.slots[rows, held_at]
        self.slots[rows, held_at] = self.slots[rows, position]
        self.slots[rows, position] = kept
        self.changes(rows, position)
        self.changes(rows, held_at)

    def changes(self, rows: IntArray, places: IntArray) -> None:
        if self._changed is not None:
            self._changed.append(rows.astype(np.int64) * self.slots.shape[1] + places)

    def take_changed(self) -> tuple[IntArray, IntArray]:
        """Return flat indices and values of entries changed since the last call; the first call returns all."""
        if self._changed is None:
            self._changed = [np.arange(self.slots.size)]
        places = np.unique(np.concatenate(self._changed)) if self._changed else np.empty(0, np.int64)
        self._changed = []
        return places.astype(np.int32), self.slots.reshape(-1)[places]


@dataclass(frozen=True, slots=True)
class RestingKV:
    slots: IntArray  # in the order of the row's table
    num_cached: int  # leading positions whose KV is valid


def new_kv(*, num_blocks: int, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int,
           dtype: torch.dtype, device: torch.device) -> torch.Tensor:  # fmt: skip
    """Allocate KV [blocks, layers, 2, block size, kv heads, head dim]. CPU pages take memory when first used."""
    shape = (num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim)
    count = math.prod(shape)
    if device.type != "cpu" or not count:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, count * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).reshape(shape)


def give_back(kv: torch.Tensor, *, first_block: int = 0) -> None:
    """Return CPU memory from `first_block` on to Linux: its content is lost, but the tensor stays usable."""
    if sys.platform != "linux" or kv.device.type != "cpu" or not kv.numel():
        return
    page, end = mmap.PAGESIZE, kv.data_ptr() + kv.nbytes
    start = -(-(kv.data_ptr() + first_block * kv[0].nbytes) // page) * page
    if start < end:
        _advise_unused(start, end - start)


def resident_bytes(kv: torch.Tensor) -> int:
    start = kv.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = kv.data_ptr() + kv.nbytes - start
    is_there = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
    failed = _call("mincore", start, length, ctypes.c_void_p(is_there.ctypes.data))
    assert not failed, "mincore"
    return mmap.PAGESIZE * int((is_there & 1).sum())


def _advise_unused(start: int, length: int) -> None:
    _call("madvise", start, length, mmap.MADV_DONTNEED)


def _call(name: str, start: int, length: int, third: object) -> int:
    return int(getattr(_libc(), name)(ctypes.c_void_p(start), ctypes.c_size_t(length), third))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def check_blocks(pool: BlockPool, owned: list[list[int]], filled: BoolArray) -> None:
    """Raise AssertionError unless every block is free, kept or in `owned` (per sequence), and counts match."""
    references = np.zeros(pool.num_blocks, np.int32)
    for blocks in owned:
        assert len(set(blocks)) == len(blocks), f"a row owns a block twice: {blocks}"
        references[blocks] += 1
    wrong = np.flatnonzero(references != pool.references)
    assert len(wrong) == 0, f"reference counts differ at blocks {wrong[:8].tolist()}"
    unowned = [*pool.free, *pool.kept]
    assert len(set(unowned)) == len(unowned), "a block is free twice"
    assert int((references > 0).sum()) + len(unowned) == pool.num_blocks, "blocks leaked"
    assert not references[unowned].any(), "a free block is owned"
    assert pool.hash_of == {block: prefix_hash for prefix_hash, block in pool.shared.items()}, (
        "a hash without its block"
    )
    assert pool.hash_of.keys().isdisjoint(pool.free), "a block is shared that holds nothing"
    assert pool.hash_of.keys() >= pool.kept.keys(), "a block is kept that no lookup finds"
    assert filled[list(pool.kept)].all(), "a block is kept that was never filled"


def check_slots(name: str, slots: IntArray, blocks: list[int], block_size: int) -> None:
    expected = sorted(block * block_size + offset for block in blocks for offset in range(block_size))
    assert sorted(slots.tolist()) == expected, f"{name}: its slots are not a permutation of its blocks' slots"

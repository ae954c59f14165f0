"""Lookup of prompt prefixes in the KV cache: whole blocks to share, partial ones (tails) to copy."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhfspec.engine.kv.space import KVSpace
from rlhfspec.engine.kv.state import EngineState
from rlhfspec.engine.scheduling.sequences import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    blocks: list[int] = field(default_factory=list)  # whole blocks from the first on, to be shared
    tail: int | None = None  # block that holds the rest; it stays its owner's and is copied
    pending: int | None = None  # block of the next part, which a sibling is computing


class Prefixes:
    def __init__(self, state: EngineState) -> None:
        self.state = state
        self.pool = state.pool

    def find(self, sequence: Sequence) -> Found:
        if not self.state.config.prefix_sharing:
            return Found()
        filled, blocks = self.state.target.filled, list[int]()
        for prefix_hash in sequence.prefix.hashes:
            block = self.pool.shared.get(prefix_hash)
            if block is None:
                return Found(blocks=blocks)
            if not filled[block]:
                return Found(blocks=blocks, pending=block)
            blocks.append(block)
        tail = self.pool.shared.get(sequence.prefix.tail_hash)
        if tail is None:
            return Found(blocks=blocks)
        return Found(blocks=blocks, tail=tail) if filled[tail] else Found(blocks=blocks, pending=tail)

    def register(self, sequence: Sequence) -> None:
        if not self.state.config.prefix_sharing:
            return
        prefix = sequence.prefix
        for prefix_hash, block in zip(prefix.hashes, sequence.blocks, strict=False):
            self.pool.register(prefix_hash, block)
        if prefix.num_tail:
            self.pool.register(prefix.tail_hash, sequence.blocks[len(prefix.hashes)])

    def tails(self, found: Found) -> list[tuple[KVSpace, int]]:
        """Return the KV spaces that hold the tail, and its block. Call it before an allocation evicts the tail."""
        if found.tail is None:
            return []
        self.pool.touch(found.tail)
        return [(space, found.tail) for space in self.state.spaces if space.filled[found.tail]]

    def copy_tails(self) -> None:
        for space in self.state.spaces:
            space.copy_tails()

"""What of a prompt is in memory already: blocks that siblings filled, or left behind, and tails to be copied."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhfspec.engine.kv.state import EngineState, KVSpace
from rlhfspec.engine.scheduling.sequences import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of one sequence's prompt."""

    blocks: list[int] = field(default_factory=list)  # whole ones, from the first on, to be shared
    tail: int | None = None  # the block in which the rest lies; it is its owner's, and copied
    is_pending: bool = False  # what comes next is being computed by a sibling right now


class Prefixes:
    """Finds and registers parts of prompts by their hashes."""

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
                return Found(blocks=blocks, is_pending=True)
            blocks.append(block)
        tail = self.pool.shared.get(sequence.prefix.tail_hash)
        if tail is None:
            return Found(blocks=blocks)
        return Found(blocks=blocks, tail=tail) if filled[tail] else Found(blocks=blocks, is_pending=True)

    def register(self, sequence: Sequence) -> None:
        """Its own blocks, filled or not: siblings wait for the one who fills them."""
        if not self.state.config.prefix_sharing:
            return
        prefix = sequence.prefix
        for prefix_hash, block in zip(prefix.hashes, sequence.blocks, strict=False):
            self.pool.register(prefix_hash, block)
        if prefix.num_tail:
            self.pool.register(prefix.tail_hash, sequence.blocks[len(prefix.hashes)])

    def tails(self, found: Found) -> list[tuple[KVSpace, int]]:
        """Where the tail's KV can be had. To be asked before blocks are given out: it may lie in one of them."""
        if found.tail is None:
            return []
        self.pool.touch(found.tail)
        return [(space, found.tail) for space in self.state.spaces if space.filled[found.tail]]

    def copy_tails(self) -> None:
        for space in self.state.spaces:
            space.copy_tails()

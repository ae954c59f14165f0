"""State of an engine, shared by scheduler, speculation, moves and profile."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhfspec.engine.base import Request
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.distilling.eagle_student import EagleStudent
from rlhfspec.engine.forward.eagle_forward import EagleForward
from rlhfspec.engine.forward.few_bits import FewBits
from rlhfspec.engine.kv.cache import BlockPool, Prefix, check_slots
from rlhfspec.engine.kv.space import KVSpace, SharedSpace
from rlhfspec.engine.requests import check_request
from rlhfspec.engine.scheduling.sequences import Generated, RowTable, Sequence
from rlhfspec.engine.scheduling.text import Tokenizer


@dataclass(slots=True, kw_only=True)
class EngineState:
    config: EngineConfig
    target: KVSpace
    draft: KVSpace | SharedSpace | None = None
    few_bits: FewBits | None = None  # the policy as its own drafter
    eagle: EagleForward | None = None  # an EAGLE-3 drafter
    student: EagleStudent | None = None  # the drafter's learning copy, if it learns
    tokenizer: Tokenizer | None = None
    eos_token_ids: tuple[int, ...] = ()
    weights_version: int = 0
    pool: BlockPool = field(init=False)
    rows: RowTable = field(init=False)
    sequences: dict[str, Sequence] = field(default_factory=dict)  # waiting or running here
    by_row: dict[int, Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.config.num_blocks, self.config.block_size)
        self.rows = RowTable(self.config.max_sequences, self.config.table_width)

    @property
    def spaces(self) -> tuple[KVSpace, ...]:
        return (self.target, self.draft) if isinstance(self.draft, KVSpace) else (self.target,)

    def new_sequence(self, request: Request, generated: Generated) -> Sequence:
        eos = () if request.params.ignore_eos else self.eos_token_ids
        return Sequence(
            request=request,
            group=request.group or f"prompt-{hash(request.prompt_token_ids)}",
            generated=generated,
            stop_ids=(*request.params.stop_token_ids, *eos),
            prefix=Prefix.of(request.prompt_token_ids, self.config.block_size),
        )

    @property
    def most_tokens(self) -> int:
        """Return the most tokens of a prompt and its response."""
        return min(self.config.max_context, (self.pool.num_blocks - 1) * self.config.block_size)

    def validate(self, request: Request) -> None:
        check_request(
            request, num_token_ids=self.target.runner.num_token_ids, most_tokens=self.most_tokens,
            has_tokenizer=self.tokenizer is not None, weights_version=self.weights_version,
        )  # fmt: skip

    def check_row(self, sequence: Sequence) -> None:
        assert self.by_row[sequence.row] is sequence, f"row {sequence.row} belongs to another"
        for space in self.spaces:
            slots = space.table.slots[sequence.row, : space.table.capacity[sequence.row]]
            check_slots(f"row {sequence.row}", slots, sequence.blocks, self.config.block_size)

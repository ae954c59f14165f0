"""A sequence on its way to another engine: what it has produced, its KV, and the manifest that says where it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlhfspec.engine.base import Request
from rlhfspec.engine.sequences import Progress, Sequence
from rlhfspec.errors import SequenceStateError
from rlhfspec.kernels.kv_pack import pack_slots, unpack_slots

if TYPE_CHECKING:
    from rlhfspec.engine.core import Engine

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceState:
    """Everything another engine needs to go on at its next step.

    `kv [positions, layers, 2, heads, dim]` and `draft_kv` hold leading positions; either may be empty, then the
    importer computes them again, with the same result.
    """

    schema: int
    target_fingerprint: str
    draft_fingerprint: str  # "" without a draft model
    weights_version: int
    request: Request
    progress: Progress
    kv: torch.Tensor
    draft_kv: torch.Tensor


def pack(engine: Engine, sequence: Sequence) -> SequenceState:
    """Copy a sequence out; the engine still owns it afterwards."""
    kv, draft_kv = torch.empty(0), torch.empty(0)
    if sequence.is_running:
        row = sequence.row
        engine.rows.save(sequence)
        slots = engine.table.slots[row, : engine.rows.cached[row]]
        kv = pack_slots(engine.target.kv, torch.from_numpy(slots.copy()))
        space, drafter = engine.speculation.space, engine.speculation.model_drafter
        if space is not None and drafter is not None:
            draft_slots = space.table.slots[row, : drafter.cached[row]]
            draft_kv = pack_slots(space.runner.kv, torch.from_numpy(draft_slots.copy()))
    return SequenceState(
        schema=SCHEMA,
        target_fingerprint=engine.target.fingerprint(),
        draft_fingerprint=_draft_fingerprint(engine),
        weights_version=engine.weights_version,
        request=sequence.request,
        progress=sequence.progress,
        kv=kv,
        draft_kv=draft_kv,
    )


def check_manifest(engine: Engine, state: SequenceState) -> None:
    """A sequence of another model, arithmetic or weights version would break the law here: refuse it by name."""
    ours = (
        ("schema", state.schema, SCHEMA),
        ("target_fingerprint", state.target_fingerprint, engine.target.fingerprint()),
        ("weights_version", state.weights_version, engine.weights_version),
    )
    for field, theirs, our in ours:
        if theirs != our:
            raise SequenceStateError(field, theirs, our)


def unpack(engine: Engine, sequence: Sequence, state: SequenceState) -> bool:
    """Give the sequence a row and write its KV; False when there is no room (the caller queues it)."""
    if not len(state.kv) or not engine.scheduler.place(sequence):
        return False
    row = sequence.row
    slots = engine.table.slots[row, : len(state.kv)]
    unpack_slots(state.kv, engine.target.kv, torch.from_numpy(slots.copy()))
    engine.rows.cached[row] = len(state.kv)
    engine.scheduler.mark_prefilled(sequence)
    space, drafter = engine.speculation.space, engine.speculation.model_drafter
    fits = state.draft_fingerprint == _draft_fingerprint(engine) and len(state.draft_kv)
    if space is not None and drafter is not None and fits:
        draft_slots = space.table.slots[row, : len(state.draft_kv)]
        unpack_slots(state.draft_kv, space.runner.kv, torch.from_numpy(np.ascontiguousarray(draft_slots)))
        drafter.cached[row] = len(state.draft_kv)
    return True


def _draft_fingerprint(engine: Engine) -> str:
    space = engine.speculation.space
    return "" if space is None else space.runner.fingerprint()

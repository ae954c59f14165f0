"""Measures the cost tables at start-up: what one forward of target and draft costs, by rows and context.

Runs on the empty engine's own tensors, in a second or so on a small model; the selector corrects them from then on.
"""

from __future__ import annotations

import time

import numpy as np

from rlhfspec.common.arrays import IntArray
from rlhfspec.engine.drafting.cost import ROW_GRID, TARGET, CostModel, CostTable
from rlhfspec.engine.forward.device import wait_for
from rlhfspec.engine.forward.runner import ModelRunner
from rlhfspec.engine.kv.state import EngineState
from rlhfspec.job.choices.drafters import DRAFTERS
from rlhfspec.kernels import gumbel
from rlhfspec.kernels.tree_attention import AttentionMeta

_CANDIDATES = 4
_SHORT_CONTEXT, _LONG_CONTEXT = 16, 256  # tokens a row; the difference is the price of reading context

_GUESSED_STEP, _GUESSED_ROW = 4e-3, 1e-4  # seconds


def profile(state: EngineState) -> CostModel:
    """Cost tables of this engine on this machine, now."""
    assert not state.by_row, "profiling writes over the cache"
    limit = max(4 * state.config.max_sequences, 16)
    grid = [rows for rows in ROW_GRID if rows <= limit]
    long_context = min(_LONG_CONTEXT, state.config.max_context)

    def measure(kind: str, rows: int, kv_tokens: int) -> float:
        space = state.target if kind == TARGET or state.draft is None else state.draft
        context = max(kv_tokens // rows, min(_SHORT_CONTEXT, state.config.max_context))
        return _time_forward(space.runner, rows, context, space.table.slots.shape, draft=kind != TARGET)

    measure(TARGET, grid[-1], 0)  # first touch of scratch memory and code
    drafters = DRAFTERS.where(lambda entry: entry.runs_draft_model and state.draft is not None)
    return CostModel.profile(measure, drafters=drafters, row_grid=grid, kv_tokens_per_row=long_context)


def unmeasured() -> CostModel:
    """A guess to start from when nothing is profiled: every row costs a little, the first a lot."""
    return CostModel({TARGET: CostTable(ROW_GRID, [_GUESSED_STEP + _GUESSED_ROW * rows for rows in ROW_GRID])})


def _time_forward(runner: ModelRunner, rows: int, context: int, table_shape: tuple[int, ...], *, draft: bool) -> float:
    """Seconds of one forward of `rows` sequences at the given context, sampling included.

    table_shape: of the engine's slot table. A graph is recorded at first sight and belongs to that shape, so what is
    timed on a device is the second forward, on a table like the engine's.
    """
    device = runner.config.device
    if device.type == "cpu":
        return _time_once(runner, rows, context, (rows, context), draft=draft)
    for _ in range(2):
        seconds = _time_once(runner, rows, context, table_shape, draft=draft)
    return seconds


def _time_once(runner: ModelRunner, rows: int, context: int, table_shape: tuple[int, ...], *, draft: bool) -> float:
    num_slots = runner.config.num_blocks * runner.config.block_size
    index = np.arange(rows, dtype=np.int32)
    slot_table: IntArray = np.zeros(table_shape, np.int32)
    slot_table[:, :context] = (np.arange(len(slot_table))[:, None] * context + np.arange(context)) % num_slots
    table_rows = index % np.int32(len(slot_table))
    positions = np.full(rows, context - 1, np.int32)
    zeros, ones = np.zeros(rows, np.int32), np.ones(rows, np.float32)
    seeds = np.arange(rows, dtype=np.uint64)
    wait_for(runner.config.device)
    began = time.perf_counter()
    meta = AttentionMeta(
        slots=slot_table[table_rows, context - 1], table_rows=table_rows, context_lens=positions + np.int32(1),
        extra=np.empty((rows, 0), np.int32), slot_table=slot_table,
    )  # fmt: skip
    logits = runner.forward(zeros, positions, meta, index)
    if draft:
        gumbel.candidates(logits, seeds, positions, ones, _CANDIDATES)
    else:
        gumbel.sample(logits, seeds, positions, ones, zeros, ones)
    wait_for(runner.config.device)
    return time.perf_counter() - began

"""Measurement of cost tables at start-up, with forwards of target and draft on the empty engine."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from rlhfspec.common.arrays import IntArray
from rlhfspec.engine.drafting.cost import GUESSED_TARGET, ROW_GRID, TARGET, CostModel, CostTable
from rlhfspec.engine.drafting.model import DraftRows
from rlhfspec.engine.forward.device import wait_for
from rlhfspec.engine.forward.eagle_forward import EagleForward
from rlhfspec.engine.forward.graphs import EXTRA_BUCKETS
from rlhfspec.engine.forward.runner import ModelRunner
from rlhfspec.engine.forward.staging import Staging
from rlhfspec.engine.kv.space import KVSpace, SharedSpace
from rlhfspec.engine.kv.state import EngineState
from rlhfspec.job.choices.drafters import DRAFTERS
from rlhfspec.kernels import gumbel
from rlhfspec.kernels.tree_attention import AttentionMeta

_CANDIDATES = 4
_SHORT_CONTEXT, _LONG_CONTEXT = 16, 256  # tokens per row; the difference gives the price of context


def profile(state: EngineState, *, only_one_row: bool = False) -> CostModel:
    """Measure the cost tables. `only_one_row`: of one row in short contexts, as if others were free."""
    assert not state.by_row, "profiling writes over the cache"
    limit = max(4 * state.config.max_sequences, 16)
    grid = [rows for rows in ROW_GRID if rows <= (1 if only_one_row else limit)]
    long_context = 0 if only_one_row else min(_LONG_CONTEXT, state.config.max_context)

    def measure(kind: str, rows: int, kv_tokens: int) -> float:
        if kind != TARGET and state.eagle is not None:
            return _time_head(state.eagle, rows)
        space = state.target if kind == TARGET or state.draft is None else state.draft
        context = max(kv_tokens // rows, min(_SHORT_CONTEXT, state.config.max_context))
        return _time_forward(space.runner, rows, context, space.table.slots.shape, draft=kind != TARGET)

    measure(TARGET, grid[-1], 0)  # first touch of scratch memory and code
    drafters = DRAFTERS.where(lambda entry: entry.runs_draft_model and (state.draft or state.eagle) is not None)
    return CostModel.profile(measure, drafters=drafters, row_grid=grid, kv_tokens_per_row=long_context)


def _time_head(eagle: EagleForward, rows: int) -> float:
    """Time one level of drafts; a head's single layer makes context cheap."""
    index, zeros = np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32)
    drafted = DraftRows(
        tokens=zeros, positions=zeros + 1, slots=zeros, table_rows=zeros, context_lens=zeros + 1,
        extra=zeros[:, None], logit_rows=index, seeds=index.astype(np.uint64), noise_positions=zeros,
        temperatures=np.ones(rows, np.float32),
    )  # fmt: skip
    device = eagle.device
    wait_for(device)
    began = time.perf_counter()
    eagle.candidates(drafted, _CANDIDATES)
    wait_for(device)
    return time.perf_counter() - began


def unmeasured() -> CostModel:
    """Return guessed cost tables for an engine that is not profiled."""
    fixed, per_row = GUESSED_TARGET
    return CostModel({TARGET: CostTable(ROW_GRID, [fixed + per_row * rows for rows in ROW_GRID])})


def record(state: EngineState) -> None:
    config = state.config
    deepest = 0 if config.speculation == "off" else EXTRA_BUCKETS[-1]
    spaces: list[KVSpace | SharedSpace] = [*state.spaces]
    if isinstance(state.draft, SharedSpace):
        spaces.append(state.draft)
    for space in spaces:
        most_rows = config.prefill_chunk + config.max_sequences * (1 + (config.tree_slots if deepest else 0))
        space.runner.record(space.table.slots, most_rows=most_rows, depth=deepest)


def _time_forward(runner: ModelRunner, rows: int, context: int, table_shape: tuple[int, ...], *, draft: bool) -> float:
    """Time one forward with sampling of `rows` sequences of `context` tokens; on a device, the second of two."""
    device = runner.config.device
    if device.type == "cpu" or runner.others is not None:
        return _time_once(runner, rows, context, _slot_table(runner, (rows, context), context), draft=draft)
    staging = Staging(device)
    slot_table = _slot_table(runner, table_shape, context)
    there = staging.up({"table": slot_table})["table"]
    for _ in range(2):
        seconds = _time_once(runner, rows, context, slot_table, draft=draft, there=there, staging=staging)
    return seconds


def _slot_table(runner: ModelRunner, shape: tuple[int, ...], context: int) -> IntArray:
    num_slots = runner.config.num_blocks * runner.config.block_size
    slot_table: IntArray = np.zeros(shape, np.int32)
    slot_table[:, :context] = (np.arange(len(slot_table))[:, None] * context + np.arange(context)) % num_slots
    return slot_table


def _time_once(
    runner: ModelRunner, rows: int, context: int, slot_table: IntArray, *, draft: bool,
    there: torch.Tensor | None = None, staging: Staging | None = None,
) -> float:  # fmt: skip
    index = np.arange(rows, dtype=np.int32)
    table_rows = index % np.int32(len(slot_table))
    positions = np.full(rows, context - 1, np.int32)
    given: dict[str, Any] = {
        "tokens": np.zeros(rows, np.int32), "positions": positions, "index": index, "table_rows": table_rows,
        "slots": slot_table[table_rows, context - 1], "context_lens": positions + np.int32(1),
        "extra": np.empty((rows, 0), np.int32), "seeds": np.arange(rows, dtype=np.uint64),
        "ones": np.ones(rows, np.float32), "zeros": np.zeros(rows, np.int32),
    }  # fmt: skip
    wait_for(runner.config.device)
    began = time.perf_counter()
    if staging is not None:
        given = staging.up(given)
    meta = AttentionMeta(
        slots=given["slots"], table_rows=given["table_rows"], context_lens=given["context_lens"], extra=given["extra"],
        slot_table=slot_table if there is None else there,
    )  # fmt: skip
    logits = runner.forward(given["tokens"], given["positions"], meta, given["index"])
    if draft:
        gumbel.candidates(logits, given["seeds"], given["positions"], given["ones"], _CANDIDATES)
    else:
        gumbel.sample(logits, given["seeds"], given["positions"], given["ones"], given["zeros"], given["ones"])
    wait_for(runner.config.device)
    return time.perf_counter() - began

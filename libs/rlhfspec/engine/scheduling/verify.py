"""Verification in one target forward: layout of roots, prompt chunks and trees as rows, and sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rlhfspec.common.arrays import BoolArray, FloatArray, IntArray, concatenate_ranges
from rlhfspec.engine.base import TopLogProbs
from rlhfspec.engine.drafting.base import Forest
from rlhfspec.engine.drafting.tree import Walk, ancestors
from rlhfspec.engine.kv.state import EngineState
from rlhfspec.engine.scheduling.scheduler import StepRows
from rlhfspec.engine.scheduling.sequences import RowTable
from rlhfspec.kernels import gumbel
from rlhfspec.kernels.tree_attention import AttentionMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    tokens: IntArray  # [B + F + M]
    log_probs: FloatArray  # [B + F + M] under the untempered target
    tempered: FloatArray  # [B + F + M] log-probs under the sampling distribution
    finite: BoolArray  # [B + F + M] False: the logits held NaN or infinity
    logits: torch.Tensor  # [B + F + M, vocab], until the next forward


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyBatch:
    """Rows of one forward. Logits are computed for B last tokens, F ends of completed prompts, and M tree nodes."""

    tokens: IntArray  # [N]
    positions: IntArray  # [N]
    meta: AttentionMeta
    logit_rows: IntArray  # [B + F + M]
    sampled_rows: IntArray  # [B + F + M] table row of each wanted row
    noise_positions: IntArray  # [B + F + M] response position of the token chosen there
    finishing: IntArray  # [F] table rows whose prompt is complete after this forward


def lay_out(state: EngineState, schedule: StepRows, forest: Forest, node_index: IntArray) -> VerifyBatch:
    rows, table = state.rows, state.target.table
    decode = schedule.decode_rows
    lengths = rows.lengths[decode]
    member = np.repeat(schedule.prefill_rows, schedule.prefill_counts)
    chunk_positions = concatenate_ranges(schedule.prefill_starts, schedule.prefill_counts)
    node_rows = decode[forest.sequence]
    node_lengths = lengths[forest.sequence]

    # in the order of wanted logits: roots, chunk tokens, nodes
    table_rows = np.concatenate((decode, member, node_rows))
    committed = np.concatenate((lengths - 1, chunk_positions))
    num_committed = len(committed)
    positions = np.concatenate((committed, node_lengths + forest.depth - 1))
    tokens = np.concatenate((rows.tokens[table_rows[:num_committed], committed], forest.token))
    slots = table.slots[table_rows, np.concatenate((committed, node_lengths + node_index))]
    extra = _ancestor_slots(forest, slots[num_committed:], num_committed)
    context_lens = np.concatenate((committed + 1, node_lengths))

    # in memory order: rows of one sequence are neighbours, so that they share each loaded key
    order = np.argsort(
        np.concatenate((np.arange(len(decode)), np.full(len(member), len(decode)), forest.sequence)), kind="stable"
    )
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)

    finishing, last_of_chunk = _finishing(rows, schedule)
    sampled_rows = np.concatenate((decode, finishing, node_rows))
    depth = np.concatenate((np.zeros(len(decode) + len(finishing), np.int32), forest.depth))
    wanted = np.concatenate((np.arange(len(decode)), len(decode) + last_of_chunk, np.arange(num_committed, len(order))))
    return VerifyBatch(
        tokens=tokens[order],
        positions=positions[order],
        meta=AttentionMeta(
            slots=slots[order],
            table_rows=table_rows[order],
            context_lens=context_lens[order],
            extra=extra[order],
            slot_table=table.slots,
        ),
        logit_rows=place[wanted],
        sampled_rows=sampled_rows,
        noise_positions=rows.lengths[sampled_rows] - rows.prompt_lengths[sampled_rows] + depth,
        finishing=finishing,
    )


def _finishing(rows: RowTable, schedule: StepRows) -> tuple[IntArray, IntArray]:
    """Return the rows whose prompt is complete, and their last tokens' indices among the chunk tokens."""
    ends = schedule.prefill_starts + schedule.prefill_counts
    complete = ends == rows.lengths[schedule.prefill_rows]
    last_of_chunk = np.cumsum(schedule.prefill_counts) - 1
    return schedule.prefill_rows[complete], last_of_chunk[complete].astype(np.int32)


def _ancestor_slots(forest: Forest, node_slots: IntArray, num_committed: int) -> IntArray:
    """Return the slots [N, D] of each node and its drafted ancestors (committed rows: none), padded with -1."""
    paths = ancestors(forest)  # [M, D]
    extra = np.full((num_committed + forest.size, paths.shape[1]), -1, np.int32)
    if forest.size:
        extra[num_committed:] = np.where(paths >= 0, node_slots[paths], -1)
    return extra


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """New tokens of S sequences, up to D+1 each: decoding ones, then those whose prompt is complete."""

    rows: IntArray  # [S] table rows
    places: npt.NDArray[np.int64]  # [S, D+1] index among the sampled tokens
    tokens: IntArray  # [S, D+1]
    log_probs: FloatArray  # [S, D+1]
    tempered: FloatArray  # [S, D+1]
    finite: BoolArray  # [S, D+1]
    counts: IntArray  # [S] valid columns


def sample(state: EngineState, batch: VerifyBatch) -> SampledTokens:
    rows, table, space = batch.sampled_rows, state.rows, state.target
    meta, given = space.stage(
        batch.meta, tokens=batch.tokens, positions=batch.positions, logit_rows=batch.logit_rows,
        seeds=table.seeds[rows], noise_positions=batch.noise_positions, temperatures=table.temperatures[rows],
        top_k=table.top_k[rows], top_p=table.top_p[rows],
    )  # fmt: skip
    logits = space.runner.forward(given["tokens"], given["positions"], meta, given["logit_rows"])
    if state.eagle is not None:
        state.eagle.store(meta.slots)
    if not len(rows):  # only chunks inside prompts
        none = np.empty(0, np.float32)
        return SampledTokens(
            tokens=np.empty(0, np.int32), log_probs=none, tempered=none, finite=np.empty(0, np.bool_), logits=logits
        )
    result = gumbel.sample(
        logits, given["seeds"], given["noise_positions"], given["temperatures"], given["top_k"], given["top_p"]
    )
    tokens, log_probs, tempered, finite = space.staging.down(result)
    return SampledTokens(tokens=tokens, log_probs=log_probs, tempered=tempered, finite=finite, logits=logits)


def choices(batch: VerifyBatch, sampled: SampledTokens, num_decode: int) -> tuple[IntArray, IntArray]:
    tokens = sampled.tokens
    return tokens[:num_decode], tokens[num_decode + len(batch.finishing) :]


def gather(batch: VerifyBatch, walk: Walk, num_decode: int, sampled: SampledTokens) -> Committed:
    num_first = len(batch.finishing)
    first_node = num_decode + num_first
    path = np.full((first_node, walk.path.shape[1]), 0, np.int64)
    path[:, 0] = np.arange(first_node)
    path[:num_decode, 1:] = np.where(walk.path[:, 1:] >= 0, walk.path[:, 1:] + first_node, 0)
    counts = np.ones(first_node, np.int32)
    counts[:num_decode] += walk.num_accepted
    return Committed(
        rows=batch.sampled_rows[:first_node],
        places=path,
        tokens=sampled.tokens[path],
        log_probs=sampled.log_probs[path],
        tempered=sampled.tempered[path],
        finite=sampled.finite[path],
        counts=counts,
    )


def top_log_probs(
    state: EngineState, new: Committed, kept: IntArray, sampled: SampledTokens
) -> dict[int, tuple[TopLogProbs, ...]]:
    """Return the best tokens at each position of the sequences that ask for them, by index in `new`."""
    found: dict[int, tuple[TopLogProbs, ...]] = {}
    for index, row in enumerate(new.rows.tolist()):
        request = state.by_row[row].request
        if request.top_log_probs:
            logits = sampled.logits[torch.as_tensor(new.places[index, : kept[index]])].double()
            values, ids = _best(logits, state.rows, row, request.top_log_probs)
            found[index] = tuple(
                tuple(pair for pair in zip(tokens, log_probs, strict=True) if pair[1] > -math.inf)
                for tokens, log_probs in zip(ids.tolist(), values.tolist(), strict=True)
            )
    return found


def _best(logits: torch.Tensor, rows: RowTable, row: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and ids of the best tokens under the distribution sampled from; at temperature 0, of one."""
    temperature, top_k, top_p = (
        torch.full((len(logits),), values[row].item(), device=logits.device)
        for values in (rows.temperatures, rows.top_k, rows.top_p)
    )
    if rows.temperatures[row] == 0:
        return logits.max(1, keepdim=True).values * 0, logits.argmax(1, keepdim=True)
    kept = gumbel.kept_tokens(logits, temperature, top_k, top_p)
    distribution = (logits / temperature[:, None]).masked_fill(~kept, -torch.inf).log_softmax(1)
    return distribution.topk(min(count, logits.shape[1]), dim=1)

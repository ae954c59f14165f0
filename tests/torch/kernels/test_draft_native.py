"""Native drafting of all levels equals the loop over levels in trees and kept slots."""

import copy
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.drafting.acceptance import AcceptanceModel
from rlhfspec.engine.drafting.base import DraftBatch, DraftPlan, Forest
from rlhfspec.engine.drafting.cost import CostTable
from rlhfspec.engine.drafting.fixed import Always
from rlhfspec.engine.drafting.levels import LevelTerms, PayingLevel
from rlhfspec.engine.drafting.model import Expanded, GrownTrees, ModelDrafter, Roots, grow, keep_drafted
from rlhfspec.engine.forward.draft_forward import DraftForward
from rlhfspec.engine.forward.models import make_state
from rlhfspec.engine.kv.cache import SlotTable
from rlhfspec.kernels.cpu import build
from rlhfspec.tiny import perturbed, random_model

pytestmark = pytest.mark.skipif(build.load() is None, reason=f"no CPU kernels: {build.unavailable_reason()}")

NUM_ROWS, MAX_CONTEXT, BLOCK = 8, 96, 16
FIELDS = ("sequence", "parent", "depth", "token", "rank")


class Space(DraftForward):
    @property
    def table(self) -> SlotTable:
        return self._space.table

    @property
    def vocab_size(self) -> int:
        return self._space.runner.vocab_size

    def prefix_computed(self, row: int) -> None:
        pass


@functools.cache
def space_for(vocab_size: int, dtype: str) -> Space:
    kind = "llama" if dtype == "float32" else "qwen3"
    model = random_model(kind, seed=3, vocab_size=vocab_size)
    config = EngineConfig(max_sequences=NUM_ROWS, max_context=MAX_CONTEXT, profile=False, num_threads=1, dtype=dtype)
    made = make_state(copy.deepcopy(model), config, draft=perturbed(model, 0.3)).draft
    blocks_per_row = MAX_CONTEXT // made.table.block_size
    for row in range(NUM_ROWS):
        made.table.append(row, list(range(row * blocks_per_row, (row + 1) * blocks_per_row)))
    return Space(made, {})


def batch_of(space: Space, rng: np.random.Generator, temperature: float) -> DraftBatch:
    size = int(rng.integers(1, NUM_ROWS + 1))
    rows = np.sort(rng.permutation(NUM_ROWS)[:size]).astype(np.int32)
    lengths = rng.integers(1, 30, size).astype(np.int32)
    for row in range(NUM_ROWS):
        owned = space.table.slots[row, :MAX_CONTEXT]
        owned[:] = rng.permutation(owned)
    space.table.capacity[:] = 1
    space.table.capacity[rows] = lengths + rng.choice([0, 1, 3, 40], size)
    return DraftBatch(
        rows=rows,
        lengths=lengths,
        prompt_lengths=rng.integers(1, lengths + 1).astype(np.int32),
        room=rng.choice([2, 3, 5, 30], size).astype(np.int32),
        seeds=rng.integers(0, 1 << 63, size).astype(np.uint64),
        temperatures=np.full(size, temperature, np.float32),
        tokens=rng.integers(0, space.vocab_size, (NUM_ROWS, MAX_CONTEXT)).astype(np.int32),
    )


def taught_acceptance(rng: np.random.Generator) -> AcceptanceModel:
    acceptance, size = AcceptanceModel(NUM_ROWS), 400
    rows, depth, rank = (rng.integers(low, high, size).astype(np.int32) for low, high in ((0, 8), (1, 5), (0, 5)))
    gap = rng.exponential(3.0, size).astype(np.float32)
    acceptance.observe("model", rows, depth, rank, gap, rng.random(size) < 0.6)
    return acceptance


def rule_for(rng: np.random.Generator, kind: str) -> Always | PayingLevel:
    if kind == "always":
        return Always()
    knots = (1, 6, 8, 12, 16, 30)
    target = CostTable(knots, np.cumsum(rng.choice([1e-5, 4e-3], 6)))  # in steps, as of tiles
    target.correct(target.seconds(9), 4e-3)
    level = CostTable(knots, np.cumsum(rng.exponential(1e-5, 6)))
    rate, success = float(np.exp(rng.uniform(np.log(100.0), np.log(4000.0)))), float(rng.uniform(0.5, 1.0))
    return PayingLevel(LevelTerms(target, level, tokens_per_second=rate, success=success, verified_rows=5))


def fresh_drafter(space: Space) -> ModelDrafter:
    space.cached[:] = 0
    return ModelDrafter(space)


def roots_of(space: Space, batch: DraftBatch, branch: int) -> Roots:
    active = np.flatnonzero(batch.room >= 2).astype(np.int32)
    tokens, scores = fresh_drafter(space)._catch_up(batch, active, max(branch, 2))
    return Roots(sequence=active, tokens=tokens, scores=scores)


def both(
    space: Space, batch: DraftBatch, plan: DraftPlan, rng: np.random.Generator, kind: str
) -> tuple[GrownTrees, GrownTrees]:
    roots, acceptance = roots_of(space, batch, plan.branch), taught_acceptance(rng)
    rule = rule_for(rng, kind)
    terms = rule.terms if isinstance(rule, PayingLevel) else None
    native = space.grow(batch, plan, roots, acceptance.curves("model", batch.rows), terms)
    return native, grow(space, batch, plan, roots, acceptance, rule)


def assert_same(native: GrownTrees, twin: GrownTrees) -> None:
    for name in FIELDS:
        have, wanted = getattr(native.forest, name), getattr(twin.forest, name)
        assert have.dtype == wanted.dtype
        assert np.array_equal(have, wanted), name
    assert native.forest.gap.tobytes() == twin.forest.gap.tobytes()
    # the last bit of a float64 exponential may differ between numpy and the C library
    np.testing.assert_allclose(native.forest.path_acceptance, twin.forest.path_acceptance, rtol=1e-6)
    assert np.array_equal(native.expanded.nodes, twin.expanded.nodes)
    assert native.expanded.level_rows.tolist() == twin.expanded.level_rows.tolist()


plans = st.builds(
    DraftPlan, drafter=st.just("model"), depth=st.integers(1, 7), width=st.integers(1, 4), branch=st.integers(1, 4)
)


@settings(max_examples=60)
@given(
    plan=plans,
    seed=st.integers(0, 1 << 32),
    temperature=st.sampled_from([0.0, 1e-3, 0.7, 1.0]),
    vocab_size=st.sampled_from([61, 3]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    kind=st.sampled_from(["always", "paying"]),
)
def test_native_drafting_gives_the_trees_of_the_python_loop(
    plan: DraftPlan, seed: int, temperature: float, vocab_size: int, dtype: str, kind: str
) -> None:
    space, rng = space_for(vocab_size, dtype), np.random.default_rng(seed)
    batch = batch_of(space, rng, temperature)
    native, twin = both(space, batch, plan, rng, kind)
    assert_same(native, twin)
    keep_both(space, batch, native, rng)


def test_native_drafts_stop_at_the_level_where_the_loop_stops() -> None:
    space, plan, depths = space_for(61, "float32"), DraftPlan(drafter="model", depth=6, width=1, branch=2), set()
    for seed in range(80):
        rng = np.random.default_rng(seed)
        batch = batch_of(space, rng, 1.0)
        batch.room[:], space.table.capacity[:] = 30, MAX_CONTEXT
        native, twin = both(space, batch, plan, rng, "paying")
        assert_same(native, twin)
        depths.add(len(native.expanded.level_rows))
    assert depths >= {0, 1, 2, 5}, "they stop at once, in the middle, and at the end"


def keep_both(space: Space, batch: DraftBatch, grown: GrownTrees, rng: np.random.Generator) -> None:
    tokens, new_lengths = batch.tokens.copy(), batch.lengths.copy()
    for sequence, row in enumerate(batch.rows.tolist()):
        path = some_path(grown.forest, sequence, rng)
        start = int(batch.lengths[sequence])
        tokens[row, start : start + len(path)] = grown.forest.token[path]
        new_lengths[sequence] = start + len(path) + 1
    after = DraftBatch(
        rows=batch.rows, lengths=batch.lengths, prompt_lengths=batch.prompt_lengths, room=batch.room,
        seeds=batch.seeds, temperatures=batch.temperatures, tokens=tokens,
    )  # fmt: skip
    space.cached[:], expected_cached = 0, np.zeros(NUM_ROWS, np.int32)
    expected_slots = space.table.slots.copy()
    if len(grown.expanded.level_rows):
        keep_drafted(after, grown.expanded, new_lengths, expected_slots, expected_cached)
    assert space.keep(after, grown.expanded, new_lengths)
    assert np.array_equal(space.table.slots, expected_slots)
    assert np.array_equal(space.cached, expected_cached)


def some_path(forest: Forest, sequence: int, rng: np.random.Generator) -> list[int]:
    path, parent = [], -1
    while rng.random() < 0.85:
        children = np.flatnonzero((forest.sequence == sequence) & (forest.parent == parent))
        if not len(children):
            break
        parent = int(rng.choice(children))
        path.append(parent)
    return path


def test_wide_batches_choose_the_most_promising_nodes_and_of_equals_the_first() -> None:
    """Equal acceptances leave the choice to the tie rule and the path."""
    space, rng = space_for(61, "float32"), np.random.default_rng(5)
    batch = batch_of(space, rng, 1.0)
    batch.room[:], space.table.capacity[:] = 30, MAX_CONTEXT
    plan, roots = DraftPlan(drafter="model", depth=4, width=1, branch=3), roots_of(space, batch, 3)
    acceptance = AcceptanceModel(NUM_ROWS)
    log_odds, shifts = acceptance.curves("model", batch.rows)
    log_odds[:] = 0.5
    native = space.grow(batch, plan, roots, (log_odds, shifts), None)
    assert_same(native, grow(space, batch, plan, roots, acceptance, Always()))
    assert native.expanded.level_rows.tolist() == [batch.size] * 3
    first = native.expanded.nodes[0, : batch.size]
    assert len(np.unique(first)) < batch.size, "the first three children of one parent come before another's"


def test_a_draft_gone_nan_proposes_nothing_and_numbers_out_of_range_are_named() -> None:
    space, rng = space_for(61, "float32"), np.random.default_rng(1)
    batch = batch_of(space, rng, 1.0)
    size = batch.size
    curves = AcceptanceModel(NUM_ROWS).curves("model", batch.rows)
    plan = DraftPlan(drafter="model", depth=3, width=1, branch=2)

    def grown(**roots: Any) -> GrownTrees | None:
        chosen = {
            "sequence": np.arange(size, dtype=np.int32),
            "tokens": np.ones((size, 2), np.int32),
            "scores": np.zeros((size, 2), np.float32),
        } | roots
        return space.grow(batch, plan, Roots(**chosen), curves, None)

    nothing = grown(tokens=np.full((size, 2), -1, np.int32), scores=np.full((size, 2), -np.inf, np.float32))
    assert nothing.forest.size == 0
    with pytest.raises(ValueError, match="scores: must be"):
        grown(scores=np.zeros((size, 2)))
    batch.room[:] = 30
    space.table.capacity[:] = MAX_CONTEXT
    kept = int(space.table.slots[batch.rows[0], batch.lengths[0]])
    space.table.slots[batch.rows[0], batch.lengths[0]] = 1 << 24
    try:
        with pytest.raises(ValueError, match="a slot outside the cache"):
            grown()
    finally:
        space.table.slots[batch.rows[0], batch.lengths[0]] = kept


def test_the_stopping_rule_gets_the_rows_of_every_drafted_level() -> None:
    space, rng = space_for(61, "float32"), np.random.default_rng(2)
    batch = batch_of(space, rng, 1.0)
    batch.room[:], space.table.capacity[:] = 30, MAX_CONTEXT
    free = CostTable([1, 100], [1e-6, 1e-6])
    rule = PayingLevel(LevelTerms(free, free, tokens_per_second=1.0, success=0.9, verified_rows=2))
    fresh_drafter(space).propose(batch, DraftPlan(drafter="model", depth=4), AcceptanceModel(NUM_ROWS), rule)
    assert rule.level_rows == [batch.size, batch.size, batch.size]


def test_keeping_an_empty_draft_changes_no_slot() -> None:
    space, rng = space_for(61, "float32"), np.random.default_rng(3)
    batch = batch_of(space, rng, 1.0)
    slots = space.table.slots.copy()
    assert space.keep(batch, Expanded(np.empty((4, 0), np.int32), np.empty(0, np.int64)), batch.lengths + 1)
    assert np.array_equal(space.table.slots, slots)

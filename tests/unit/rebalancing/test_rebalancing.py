"""Plans keep their laws, equal the slow planner's, are fast, and learn costs and lengths."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from twins.planner import plan_slowly

from rlhfspec.moves.rebalancing.curve import LearnedCurve
from rlhfspec.moves.rebalancing.fleet import Fleet, PlannerSettings
from rlhfspec.moves.rebalancing.plan import plan
from rlhfspec.moves.rebalancing.planned import PlannedMoves
from rlhfspec.moves.rebalancing.residual import Residual, mean_residual_life

NOW = 100.0
PROMPT = PlannerSettings(pause_seconds=0.001)


def random_fleet(seed: int, *, is_alike: bool = False) -> Fleet:
    """Return a fleet in any possible state, without ties in lengths and curves."""
    rng = np.random.default_rng(seed)
    num_generators = int(rng.integers(1, 9))
    num_sequences = int(rng.integers(0, 12 * num_generators))
    tight = rng.random() < 0.5
    step = 10 ** rng.uniform(-4, -2, num_generators)
    fleet = Fleet.of(
        step_seconds=step,
        sequence_seconds=10 ** rng.uniform(-4, -2.5, num_generators),
        alone_step_seconds=step * rng.uniform(0.5, 1.0, num_generators),
        prefill_owed=rng.random(num_generators) * (rng.random() < 0.3),
        free_rows=rng.integers(0, 4 if tight else 40, num_generators),
        free_tokens=rng.integers(0, 1500 if tight else 60_000, num_generators),
        weights_version=rng.integers(0, rng.integers(1, 3), num_generators),
        is_leaving=rng.random(num_generators) < (0.2 if rng.random() < 0.4 else 0.0),
        host=rng.integers(0, num_generators, num_generators),
        generator=np.sort(rng.integers(0, num_generators, num_sequences)),
        remaining=100 * rng.lognormal(0, 1, num_sequences),
        generated=rng.integers(0, 500, num_sequences),
        held=rng.integers(1, 700, num_sequences),
        moved_at=np.where(rng.random(num_sequences) < 0.3, NOW - rng.uniform(0, 2, num_sequences), -np.inf),
    )
    if not is_alike:
        return fleet
    a_step, a_sequence = (np.full(num_generators, each[0]) for each in (fleet.step_seconds, fleet.sequence_seconds))
    return replace(fleet, step_seconds=a_step, alone_step_seconds=a_step, sequence_seconds=a_sequence)


def moves_of(planned: PlannedMoves) -> list[tuple[int, int, int]]:
    return list(zip(planned.sequence.tolist(), planned.source.tolist(), planned.destination.tolist(), strict=True))


def after(fleet: Fleet, planned: PlannedMoves, now: float = NOW) -> Fleet:
    generator, moved_at = fleet.generator.copy(), fleet.moved_at.copy()
    rows, tokens = fleet.free_rows.copy(), fleet.free_tokens.copy()
    for sequence, source, destination in moves_of(planned):
        generator[sequence], moved_at[sequence] = destination, now
        held = int(fleet.held[sequence])
        rows[source], rows[destination] = rows[source] + 1, rows[destination] - 1
        tokens[source], tokens[destination] = tokens[source] + held, tokens[destination] - held
    by = np.argsort(generator, kind="stable")
    columns = {name: getattr(fleet, name)[by] for name in ("generated", "held", "remaining", "limit")}
    return replace(fleet, generator=generator[by], moved_at=moved_at[by], free_rows=rows, free_tokens=tokens, **columns)


@given(st.integers(0, 1 << 32))
@settings(max_examples=400, deadline=None)
def test_the_plan_equals_that_of_the_slow_planner(seed: int) -> None:
    fleet = random_fleet(seed)
    assert moves_of(plan(fleet, NOW, PROMPT)) == plan_slowly(fleet, NOW, PROMPT)


@given(st.integers(0, 1 << 32))
@settings(max_examples=200, deadline=None)
def test_a_plan_moves_nothing_to_prefill_workers_and_only_leaving_ones_are_emptied(seed: int) -> None:
    fleet = random_fleet(seed)
    prefilling = np.arange(fleet.num_generators) < fleet.num_generators / 2
    fleet = replace(fleet, is_prefilling=prefilling)
    planned = plan(fleet, NOW, PROMPT)
    assert not prefilling[planned.destination].any()
    assert (fleet.is_leaving | ~prefilling)[planned.source].all()


@given(st.integers(0, 1 << 32))
@settings(max_examples=300, deadline=None)
def test_a_plan_makes_only_allowed_moves(seed: int) -> None:
    fleet = random_fleet(seed)
    planned = plan(fleet, NOW, PROMPT)
    sequence, source, destination = planned.sequence, planned.source, planned.destination
    assert len(set(sequence.tolist())) == len(sequence)  # each at most once
    assert (NOW - fleet.moved_at[sequence] >= PROMPT.rest_seconds).all()
    assert (fleet.generator[sequence] == source).all()
    assert (fleet.weights_version[source] == fleet.weights_version[destination]).all()
    assert not (fleet.is_leaving | planned.is_closing)[destination].any()
    assert (np.bincount(destination, minlength=fleet.num_generators) <= fleet.free_rows).all()
    tokens = np.bincount(destination, (fleet.held + fleet.remaining)[sequence], minlength=fleet.num_generators)
    assert (tokens <= fleet.free_tokens).all()


@given(st.integers(0, 1 << 32))
@settings(max_examples=200, deadline=None)
def test_the_plan_does_not_depend_on_the_numbers_of_generators(seed: int) -> None:
    fleet = random_fleet(seed)
    order = np.random.default_rng(seed + 1).permutation(fleet.num_generators)  # new -> old
    new_of = np.argsort(order)
    sequences = np.argsort(new_of[fleet.generator], kind="stable")  # new -> old
    columns = {name: getattr(fleet, name) for name in Fleet.__slots__ if name not in PER_SEQUENCE}
    per_generator = {name: each[order] for name, each in columns.items() if len(each) == fleet.num_generators}
    per_sequence = {name: getattr(fleet, name)[sequences] for name in PER_SEQUENCE}
    per_sequence["generator"] = new_of[per_sequence["generator"]]
    renamed = plan(replace(fleet, **per_generator, **per_sequence), NOW, PROMPT)
    told = {(int(sequences[one]), int(order[two]), int(order[three])) for one, two, three in moves_of(renamed)}
    assert told == set(moves_of(plan(fleet, NOW, PROMPT)))


def drain_seconds(fleet: Fleet) -> np.ndarray:
    """[N]: Return the time until each generator is done."""
    total, longest = fleet.work()
    return fleet.step_seconds * longest + fleet.sequence_seconds * total + fleet.prefill_owed


PER_SEQUENCE = ("generator", "generated", "held", "remaining", "limit", "moved_at")


@given(st.integers(0, 1 << 32))
@settings(max_examples=150, deadline=None)
def test_each_plan_lowers_the_sorted_ends_until_nothing_moves(seed: int) -> None:
    """Therefore no state of the fleet repeats."""
    fleet = replace(random_fleet(seed), is_leaving=np.zeros(0, bool))
    fleet = replace(fleet, is_leaving=np.zeros(fleet.num_generators, bool), alone_step_seconds=fleet.step_seconds)
    ends = sorted(drain_seconds(fleet).tolist(), reverse=True)
    for _ in range(fleet.num_sequences * 8 + 1):
        planned = plan(replace(fleet, moved_at=np.full(fleet.num_sequences, -np.inf)), NOW, PROMPT)
        if not planned.num_moves:
            return
        fleet = after(fleet, planned)
        before, ends = ends, sorted(drain_seconds(fleet).tolist(), reverse=True)
        assert ends < before
    raise AssertionError("it never comes to rest")


@given(st.integers(0, 1 << 32), st.sampled_from([0.0, 0.2, 1.0]))
@settings(max_examples=150, deadline=None)
@example(419720, 0.2)  # whether a host has room must not depend on where in it its samples are
@example(20296410, 0.2)
def test_repeated_plans_with_shared_hosts_stop_moving(seed: int, engine_cost: float) -> None:
    fleet = random_fleet(seed)
    fleet = replace(fleet, is_leaving=np.zeros(fleet.num_generators, bool), host=fleet.host % 3)
    chosen = replace(PROMPT, engine_cost=engine_cost)
    num_moves = 0
    for _ in range(60):
        planned = plan(replace(fleet, moved_at=np.full(fleet.num_sequences, -np.inf)), NOW, chosen)
        if not planned.num_moves:
            return
        num_moves += planned.num_moves
        fleet = after(fleet, planned)
    raise AssertionError(f"{num_moves} moves of {fleet.num_sequences} sequences, and it goes on")


@given(st.integers(0, 1 << 32))
@settings(max_examples=100, deadline=None)
def test_a_memory_bound_fleet_is_left_alone(seed: int) -> None:
    fleet = random_fleet(seed, is_alike=True)
    fullest = max(np.bincount(fleet.generator, minlength=1).max(), 1)
    fleet = replace(
        fleet,
        sequence_seconds=fleet.step_seconds / (40 * fullest),  # t0 >> c * B
        is_leaving=np.zeros(fleet.num_generators, bool),
        prefill_owed=np.zeros(fleet.num_generators),
    )
    assert plan(fleet, NOW, PROMPT).num_moves == 0


@given(st.integers(0, 1 << 32))
@settings(max_examples=30, deadline=None)
@example(48)  # of two thousand one of those that move most: 12 times a sequence
def test_adversarial_lengths_move_a_sequence_at_most_once_per_rest(seed: int) -> None:
    """Lure sequences back by other expectations at every plan: each moves at most once in its rest."""
    rng = np.random.default_rng(seed)
    fleet = random_fleet(seed, is_alike=True)
    fleet = replace(fleet, is_leaving=np.zeros(fleet.num_generators, bool))
    fleet = replace(fleet, moved_at=np.full(fleet.num_sequences, -np.inf))
    num_moves, num_plans, plan_seconds = 0, 40, PROMPT.rest_seconds / 2
    for now in NOW + plan_seconds * np.arange(num_plans):
        planned = plan(fleet, now, PROMPT)
        assert (now - fleet.moved_at[planned.sequence] >= PROMPT.rest_seconds).all()
        num_moves += planned.num_moves
        fleet = after(fleet, planned, now)
        crowded = fleet.generator == rng.integers(0, fleet.num_generators)
        fleet = replace(fleet, remaining=np.where(crowded, 900.0, 30.0) * rng.uniform(0.9, 1.1, fleet.num_sequences))
    assert num_moves <= fleet.num_sequences * num_plans * plan_seconds / PROMPT.rest_seconds


def test_a_leaving_generators_sequences_go_first_and_all_of_them() -> None:
    fleet = Fleet.of(
        step_seconds=[1e-3] * 3, sequence_seconds=[5e-4] * 3, is_leaving=[False, True, False],
        generator=[0] * 2 + [1] * 30, remaining=[100.0] * 2 + list(range(1, 31)), held=[10] * 32,
    )  # fmt: skip
    planned = plan(fleet, NOW)
    left = planned.source == 1
    assert left[:30].all()
    assert sorted(planned.sequence[left].tolist()) == list(range(2, 32))
    assert planned.why_move(0, lambda i: f"generator {i}") == "generator 1 is leaving; generator 2 ends in 0.00 s"


def test_a_leaving_generator_is_named_when_no_other_has_room() -> None:
    fleet = Fleet.of(
        step_seconds=[1e-3] * 2, sequence_seconds=[5e-4] * 2, is_leaving=[False, True], free_rows=[0, 9],
        generator=[1], remaining=[50.0],
    )  # fmt: skip
    planned = plan(fleet, NOW)
    assert planned.num_moves == 0
    assert planned.why_not() == ["1: no generator has room for what it has to hand over"]


def shared_host(num_left: int, free_rows: int = 64) -> Fleet:
    """Return a host measured with plain decoding: 8.8 + .37 B ms with both busy, 6.1 + .46 B alone."""
    return Fleet.of(
        step_seconds=[8.8e-3] * 2, sequence_seconds=[0.37e-3] * 2, alone_step_seconds=[6.1e-3] * 2,
        alone_sequence_seconds=[0.46e-3] * 2, host=[0, 0], free_rows=[free_rows] * 2,
        generator=[0] * num_left + [1] * num_left,
        remaining=np.linspace(300, 200, 2 * num_left).reshape(-1, 2).T.reshape(-1),  # longest, next on the other, ...
    )  # fmt: skip


def test_engines_that_share_bandwidth_are_consolidated_in_the_tail_only() -> None:
    assert plan(shared_host(12), NOW).num_moves == 0
    planned = plan(fleet := shared_host(2), NOW)
    assert planned.is_closing.tolist() == [False, True]
    assert moves_of(planned) == [(2, 1, 0), (3, 1, 0)]
    assert planned.why_move(0).startswith("this host is faster with only 1 of its engines")
    again = plan(replace(after(fleet, planned), moved_at=np.full(4, -np.inf)), NOW)
    assert again.num_moves == 0  # it stays so
    assert again.dry.tolist() == [1]
    assert again.advice == ("consolidate",)
    assert not plan(shared_host(2, free_rows=1), NOW).is_closing.any()  # no room for all of them


def test_engines_of_a_host_are_consolidated_if_the_engine_cost_is_set() -> None:
    fleet = replace(shared_host(6), alone_step_seconds=np.full(2, 8.8e-3), alone_sequence_seconds=np.full(2, 0.37e-3))
    assert plan(fleet, NOW).num_moves == 0
    assert plan(fleet, NOW, PlannerSettings(engine_cost=0.5)).num_moves == 6


def test_a_prefill_worker_is_never_advised_to_learn() -> None:
    fleet = Fleet.of(
        step_seconds=[1e-2] * 3, sequence_seconds=[1e-5] * 3, generator=[2], remaining=[500.0], held=[9],
        is_prefilling=[1, 0, 0],
    )  # fmt: skip
    assert plan(fleet, NOW, PlannerSettings(learns=True)).advice == ("score", "learn")


@pytest.mark.parametrize(
    ("learns", "left", "advice"),
    [
        (False, 500.0, ("score",)),  # 5 s: time for other work
        (False, 20.0, ("wait",)),
        (True, 500.0, ("score",)),  # scores are waited for
        (True, 500.0, ("learn", "score", "score")),
        (True, 20.0, ("learn", "learn")),  # what comes soon ends it at once
    ],
)
def test_dry_generators_get_advice(learns: bool, left: float, advice: tuple[str, ...]) -> None:
    n = 1 + len(advice)
    fleet = Fleet.of(step_seconds=[1e-2] * n, sequence_seconds=[1e-5] * n, generator=[0], remaining=[left], held=[9])
    assert plan(fleet, NOW, PlannerSettings(learns=learns)).advice == advice


def test_the_plan_explains_why_nothing_moves() -> None:
    def why(**changed: object) -> list[str]:
        values: dict[str, object] = {
            "step_seconds": [1e-2] * 2, "sequence_seconds": [5e-3] * 2,
            "generator": [0, 0, 1], "remaining": [100.0, 100.0, 20.0],
        }  # fmt: skip
        return plan(Fleet.of(**(values | changed)), NOW).why_not()  # type: ignore[arg-type]

    assert why(remaining=[100.0, 99.0, 99.0]) == ["0 ends in 2.00 s, 1 in 1.48 s: every sequence would end later there"]
    assert why(generator=[0, 1], remaining=[100.0, 98.0]) == ["0 ends in 1.50 s, 1 in 1.47 s: too near to each other"]
    bound = why(step_seconds=[1e-2] * 2, sequence_seconds=[1e-5] * 2)
    assert bound == ["0 ends in 1.00 s, 1 in 0.20 s: steps take as long with fewer sequences, so nothing is gained"]
    resting = why(moved_at=[NOW, NOW, NOW])
    assert resting == ["0 ends in 2.00 s, 1 in 0.30 s: sequences that could move have just moved, or do not fit"]


def test_a_plan_of_a_large_fleet_takes_a_few_passes_over_its_arrays() -> None:
    """A plan takes some sixty array operations; a loop would take ten times as long."""
    rng = np.random.default_rng(0)
    fleet = Fleet.of(
        step_seconds=np.full(4000, 2.5e-3), sequence_seconds=np.full(4000, 1e-3),
        free_rows=np.full(4000, 64), free_tokens=np.full(4000, 200_000),
        generator=np.sort(rng.integers(0, 4000, 400_000)), remaining=128 * rng.lognormal(0, 1, 400_000),
        held=rng.integers(20, 2000, 400_000),
    )  # fmt: skip

    def best_of(work: object, repeats: int = 7) -> float:
        seconds = []
        for _ in range(repeats):
            begun = time.thread_time()  # others use the machine too
            work()  # type: ignore[operator]
            seconds.append(time.thread_time() - begun)
        return min(seconds)

    def passing() -> None:
        total = fleet.remaining
        for _ in range(10):
            total = np.maximum(total * 1.01, fleet.remaining)

    assert plan(fleet, NOW).num_moves > 2000
    assert best_of(lambda: plan(fleet, NOW)) < 20 * best_of(passing)


@pytest.mark.parametrize("num", [0, 1])
def test_a_fleet_without_sequences_is_planned(num: int) -> None:
    planned = plan(Fleet.of(step_seconds=[1e-3] * num, sequence_seconds=[1e-4] * num, generator=[], remaining=[]), NOW)
    assert planned.num_moves == 0
    assert planned.advice == ("score",) * num, "there may be samples to score"


STEP, SEQUENCE = 8.8e-3, 0.37e-3


def learnt(rows: np.ndarray) -> LearnedCurve:
    rng = np.random.default_rng(0)
    curve = LearnedCurve((8.0, 1.0))
    for number in rows.tolist():
        curve.learn(number, (STEP + SEQUENCE * number) * rng.lognormal(0, 0.1))
    return curve


def test_a_curve_is_found_through_noise_and_steps_in_which_the_process_was_stopped() -> None:
    curve = learnt(np.random.default_rng(1).integers(1, 64, 600))
    for _ in range(3):
        curve.learn(20, 5.0)
    assert curve.step_seconds == pytest.approx(STEP, rel=0.35)
    assert curve.sequence_seconds == pytest.approx(SEQUENCE, rel=0.35)
    assert curve.seconds(32) == pytest.approx(STEP + SEQUENCE * 32, rel=0.15)


@pytest.mark.parametrize("number", [1, 8, 64])
def test_a_curve_learnt_at_one_batch_size_takes_its_shape_from_the_fleet(number: int) -> None:
    slow = 3.0  # a machine that is slower than the fleet
    curve = LearnedCurve((STEP / slow, SEQUENCE / slow))
    for _ in range(500):
        curve.learn(number, STEP + SEQUENCE * number)
    assert curve.step_seconds == pytest.approx(STEP, rel=1e-6)
    assert curve.sequence_seconds == pytest.approx(SEQUENCE, rel=1e-6)


def test_a_learnt_curve_forgets_old_measurements() -> None:
    curve = learnt(np.arange(1, 65).repeat(8))
    for number in np.arange(1, 65).repeat(16).tolist():
        curve.learn(number, 2 * (STEP + SEQUENCE * number))
    assert curve.seconds(20) == pytest.approx(2 * (STEP + SEQUENCE * 20), rel=0.1)


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e3)), max_size=60))
@settings(deadline=None)
def test_a_learnt_curve_is_never_negative(points: list[tuple[float, float]]) -> None:
    curve = LearnedCurve()
    for number, seconds in points:
        curve.learn(number, seconds)
        assert math.isfinite(curve.step_seconds)
        assert curve.step_seconds >= 0
        assert curve.sequence_seconds >= 0


def test_a_prefill_outlier_hardly_changes_the_curve() -> None:
    curve = LearnedCurve()
    for _ in range(20):
        curve.learn_prefill(40, 40 * 5e-4)
    curve.learn_prefill(40, 60.0)
    assert curve.prefill_seconds == pytest.approx(5e-4, rel=0.2)


def loop_of_mean_residual_life(lengths: list[float], cut: list[bool], elapsed: float) -> float:
    """Return the area under the product-limit estimate past `elapsed`."""
    area, here, survival, before = 0.0, None, 1.0, 0.0
    for length in sorted(set(lengths)):
        if elapsed < length:
            here = survival if here is None else here
            area += (length - max(before, elapsed)) * survival
        at_risk = sum(other >= length for other in lengths)
        ended = sum(other == length and not was_cut for other, was_cut in zip(lengths, cut, strict=True))
        survival *= 1 - ended / at_risk
        before = length
    if here is None or here < 1e-12:
        return elapsed * 0.1
    return (area + survival * before * 0.1) / here


@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=30), st.integers(0, 40))
@settings(deadline=None)
def test_what_remains_is_the_area_under_the_survival_curve(seen: list[tuple[int, bool]], elapsed: int) -> None:
    lengths, cut = [float(length) for length, _ in seen], [was_cut for _, was_cut in seen]
    found = mean_residual_life(np.array(lengths), np.array(cut), np.array([float(elapsed)]))[0]
    assert found == pytest.approx(loop_of_mean_residual_life(lengths, cut, float(elapsed)), rel=1e-6)


def test_without_seen_lengths_half_of_the_limit_is_expected() -> None:
    assert Residual().remaining([0, 500], [1.0, 1.0], [1000, 500]).tolist() == [500.0, 250.0]


def test_a_prompts_factor_scales_what_is_expected_and_the_limit_holds() -> None:
    residual = Residual()
    for length in np.random.default_rng(0).lognormal(math.log(128), 1, 2000).tolist():
        residual.learn(int(length))
    short, usual, long = residual.remaining([10] * 3, [0.5, 1.0, 2.0], [10_000] * 3).tolist()
    assert short < usual < long
    assert residual.remaining([10], [1.0], [7]).tolist() == [7.0]
    # of a lognormal, who got far has far to go
    assert residual.remaining([400], [1.0], [10_000])[0] > residual.remaining([100], [1.0], [10_000])[0]

"""The acceptance model and the cost tables: calibrated, monotone, quick to correct."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from rlhfspec.engine.drafting.acceptance import AcceptanceModel
from rlhfspec.engine.drafting.cost import ROW_GRID, TARGET, CostModel, CostTable, draft_kind, from_below, host_kind


def predicted(
    model: AcceptanceModel, gaps: list[float], *, drafter: str = "model", row: int = 0, rank: int = 0, depth: int = 1
) -> npt.NDArray[np.float32]:
    n = len(gaps)
    rows, depths, ranks = (np.full(n, value, np.int32) for value in (row, depth, rank))
    return model.predict(drafter, rows, depths, ranks, np.array(gaps, np.float32))


def feed(model: AcceptanceModel, rows: list[int], rate: float, *, steps: int, seed: int = 0, gap: float = 1.2) -> None:
    random = np.random.default_rng(seed)
    n = len(table_rows := np.repeat(np.array(rows, np.int32), 6))
    ones = np.ones(n, np.int32)
    for _ in range(steps):
        model.observe("model", table_rows, ones, ones * 0, np.full(n, gap, np.float32), random.random(n) < rate)


def test_the_model_learns_acceptance_as_a_function_of_the_gap() -> None:
    random = np.random.default_rng(1)
    model = AcceptanceModel(8, half_life=50_000.0)
    for _ in range(700):
        gap = random.exponential(3.0, 64).astype(np.float32)
        rank = random.integers(0, 3, 64).astype(np.int32)
        depth = random.integers(1, 6, 64).astype(np.int32)
        best = 1.0 - 0.6 * np.exp(-0.5 * gap)
        truth = np.where(rank == 0, best, 0.3 * np.exp(-0.6 * gap))
        rows = random.integers(0, 8, 64).astype(np.int32)
        model.observe("model", rows, depth, rank, gap, random.random(64) < truth)
    gaps = [0.1, 0.7, 1.7, 3.5, 7.0]
    of_best = [1 - 0.6 * np.exp(-0.5 * gap) for gap in gaps]
    for rank_asked, expected in ((0, of_best), (1, [0.3 * np.exp(-0.6 * gap) for gap in gaps])):
        of_rows = np.mean([predicted(model, gaps, row=row, rank=rank_asked) for row in range(8)], axis=0)
        assert of_rows == pytest.approx(expected, abs=0.05)
    assert model.calibration_error() < 0.02
    for row in model.calibration():
        assert row.count < 100 or row.real == pytest.approx(row.predicted, abs=0.08)


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 4), st.integers(1, 5), st.booleans()), min_size=1, max_size=60)
)
def test_predictions_are_probabilities_after_any_observations(seen: list[tuple[float, int, int, bool]]) -> None:
    model = AcceptanceModel(2)
    types = (np.float32, np.int32, np.int32, bool)
    gap, rank, depth, accepted = map(np.array, zip(*seen, strict=True), types)
    rows = np.zeros(len(gap), np.int32)
    for _ in range(3):
        model.observe("model", rows, depth, rank, gap, accepted)
    grid = np.linspace(0, 40, 200).tolist()
    for depth_asked in (1, 2, 7):
        for rank_asked in (0, 1, 5):
            chances = predicted(model, grid, rank=rank_asked, depth=depth_asked)
            assert ((chances > 0) & (chances < 1)).all()


def test_a_bad_sequence_does_not_spoil_predictions_for_others() -> None:
    model = AcceptanceModel(4)
    feed(model, [0, 1, 2], 0.8, steps=60)
    feed(model, [3], 0.1, steps=60)  # alone, as in a long tail
    assert predicted(model, [1.2], row=3) == pytest.approx([0.1], abs=0.1)
    assert predicted(model, [1.2], row=0)[0] > 0.68
    model.forget(3)
    assert predicted(model, [1.2], row=3)[0] > 0.65, "the next sequence in the row must not inherit the bad tail"


def test_acceptance_seen_in_all_sequences_predicts_new_ones() -> None:
    model = AcceptanceModel(4)
    for generation in range(60):
        feed(model, [0, 1, 2, 3], 0.3, steps=12, seed=generation)
        for row in range(4):
            model.forget(row)
    assert predicted(model, [1.2]) == pytest.approx([0.3], abs=0.08)


def test_old_observations_fade() -> None:
    model = AcceptanceModel(4, half_life=300.0)
    feed(model, [0, 1, 2, 3], 0.9, steps=100)
    feed(model, [0, 1, 2, 3], 0.2, steps=100, seed=1)
    assert predicted(model, [1.2], row=1) == pytest.approx([0.2], abs=0.12)


def test_a_reset_falls_back_towards_the_prior() -> None:
    model, fresh = AcceptanceModel(4), AcceptanceModel(4)
    feed(model, [0, 1], 0.02, steps=200)
    assert predicted(model, [1.2])[0] < 0.1
    model.reset()
    assert abs(predicted(model, [1.2])[0] - predicted(fresh, [1.2])[0]) < 0.45
    assert predicted(model, [1.2])[0] > 0.3


def test_odd_gaps_and_rows_beyond_the_announced_are_harmless() -> None:
    chances = predicted(model := AcceptanceModel(1), [float("nan"), float("inf"), -3.0, 1e30], row=7)
    assert ((chances > 0) & (chances < 1)).all()
    model.forget(100)
    empty = np.empty(0, np.int32)
    model.observe("model", empty, empty, empty, empty.astype(np.float32), empty.astype(bool))
    assert len(model.predict("model", empty, empty, empty, empty.astype(np.float32))) == 0


def test_the_acceptance_of_each_drafter_is_learnt_separately() -> None:
    model = AcceptanceModel(2)
    feed(model, [0], 0.02, steps=100)
    assert predicted(model, [1.2], drafter="suffix")[0] > 0.6
    assert {row.drafter for row in model.calibration()} == {"model"}


seconds_lists = st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=8)


@given(seconds_lists, st.lists(st.tuples(st.integers(1, 600), st.floats(1e-5, 2.0)), max_size=30))
def test_a_table_is_monotone_whatever_is_measured_or_seen(seconds: list[float], seen: list[tuple[int, float]]) -> None:
    table = CostTable(ROW_GRID[: len(seconds)], seconds)
    for rows, real in seen:
        table.correct(table.seconds(rows), real)
    curve = table.seconds_array(np.arange(0, 700))
    assert (np.diff(curve) >= -1e-12).all()
    assert (curve > 0).all()


@given(seconds_lists, st.floats(0.0, 2000.0), st.floats(0.0, 1e5))
def test_scalars_and_arrays_agree(seconds: list[float], rows: float, kv_tokens: float) -> None:
    table = CostTable(ROW_GRID[: len(seconds)], seconds, per_kv_token=1e-7)
    table.correct(0.4, 0.5)
    assert table.seconds(rows, kv_tokens) == pytest.approx(float(table.seconds_array([rows], kv_tokens)[0]))


def test_costs_are_interpolated_between_knots_and_extrapolated_beyond() -> None:
    table = CostTable([1, 3, 5], [1.0, 2.0, 6.0])
    assert table.seconds_array([0, 1, 2, 4, 5, 10]).tolist() == pytest.approx([1.0, 1.0, 1.5, 4.0, 6.0, 16.0])


def test_a_lower_cost_of_more_rows_caps_the_cost_of_fewer() -> None:
    assert CostTable([1, 2, 4], [3.0, 1.0, 2.0]).seconds(1) == 1.0


def test_a_profile_is_a_convex_curve_that_no_unlucky_measurement_bends() -> None:
    """A temporarily slow machine must not make knots look like a step, or rows behind the last one free."""
    random = np.random.default_rng(3)
    true = [0.01 + 1e-4 * max(rows - 16, 0) for rows in ROW_GRID]
    measured = [s * float(random.choice([1.0, 1.0, 2.0])) for s in true]
    measured[0], measured[-1], measured[-2] = true[0], true[-1], 2 * true[-2]
    found = from_below(ROW_GRID, measured)
    slopes = np.diff(found) / np.diff(ROW_GRID)
    assert (np.diff(slopes) >= -1e-12).all()
    assert (np.array(found) <= measured).all()
    assert found == pytest.approx(true, rel=0.15)
    assert CostTable(ROW_GRID, found).seconds(2000) == pytest.approx(0.01 + 1e-4 * 1984, rel=0.1)


def test_rows_beyond_a_flat_end_of_a_cost_table_cost_time() -> None:
    assert CostTable([1, 100, 200], [0.01, 0.03, 0.03]).seconds(1200) == pytest.approx(0.03 + 1000 * 0.02 / 199)


def test_a_tenfold_outlier_moves_next_to_nothing() -> None:
    table = CostTable([1, 64], [0.01, 0.02])
    for _ in range(50):
        table.correct(table.seconds(32), table.seconds(32) * 1.02)
    before = table.seconds(32)
    table.correct(before, 10 * before)
    assert table.seconds(32) == pytest.approx(before, rel=0.02)


def test_one_outlier_in_twenty_does_not_bend_the_table() -> None:
    random = np.random.default_rng(0)
    table = CostTable(ROW_GRID, [0.01 + 1e-4 * rows for rows in ROW_GRID])
    for _ in range(600):
        rows = int(random.integers(1, 200))
        slow = 10.0 if random.random() < 0.05 else 1.0
        real = (0.01 + 1e-4 * rows) * slow * math.exp(random.normal(0, 0.03))
        table.correct(table.seconds(rows), real)
    assert table.seconds_array([1, 32, 128]) == pytest.approx([0.0101, 0.0132, 0.0228], rel=0.06)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_cost_table_off_by_a_factor_is_corrected_within_60_steps(factor: float) -> None:
    table = CostTable(ROW_GRID, [0.01 + 1e-4 * rows for rows in ROW_GRID])
    for _ in range(60):
        table.correct(table.seconds(40), 0.014 * factor)
    assert table.seconds(40) == pytest.approx(0.014 * factor, rel=0.1)


def test_a_profile_takes_the_minimum_of_its_repetitions() -> None:
    calls: dict[tuple[str, int], int] = {}

    def measure(kind: str, rows: int, kv_tokens: int) -> float:
        calls[kind, rows] = calls.get((kind, rows), 0) + 1
        return 0.001 * rows + (0.5 if calls[kind, rows] != 2 else 0.0)

    costs = CostModel.profile(measure, drafters=("model",), row_grid=(1, 4), repetitions=3)
    assert costs.table(TARGET).seconds_array([1, 4]).tolist() == pytest.approx([0.001, 0.004])
    assert set(costs.tables) == {TARGET, draft_kind("model"), draft_kind("model", first=True)}


def test_context_has_a_price_when_it_is_measured() -> None:
    costs = CostModel.profile(lambda kind, rows, kv: 0.01 + 1e-6 * kv, kv_tokens_per_row=500, row_grid=(1, 8))
    assert costs.table(TARGET).seconds(4, 10_000) == pytest.approx(0.02)


def test_unmeasured_costs_start_from_a_guess_and_are_learnt() -> None:
    costs = CostModel({TARGET: CostTable([1, 2], [0.01, 0.01])})
    for _ in range(80):
        costs.observe(host_kind("suffix"), 8, 0.004)
    assert costs.host_seconds("suffix", 8) == pytest.approx(0.004, rel=0.1)
    assert costs.errors()[host_kind("suffix")] < 1.0
    assert host_kind("model") not in costs.errors()
    with pytest.raises(KeyError, match="no cost table for 'lunch'"):
        costs.table("lunch")


def test_the_cost_error_covers_only_the_last_window() -> None:
    costs = CostModel()
    for _ in range(300):
        costs.record_error("step", 2.0, 1.0)
    for _ in range(256):
        costs.record_error("step", 1.1, 1.0)
    assert costs.errors() == {"step": pytest.approx(0.1)}


def test_all_cost_tables_of_a_draft_are_corrected_by_the_same_factor() -> None:
    costs = CostModel.profile(lambda kind, rows, kv_tokens: 0.001, drafters=("model",), row_grid=(1, 64))
    for _ in range(80):
        costs.observe_draft("model", 4, [4, 4, 3], 0.008)
    assert costs.observe_draft("model", 4, [4, 4, 3], 0.008) == pytest.approx(0.008, rel=0.05)
    assert costs.table(draft_kind("model")).seconds(4) == pytest.approx(0.002, rel=0.05)
    assert costs.table(TARGET).seconds(4) == 0.001


def test_rows_must_ascend() -> None:
    with pytest.raises(ValueError, match="ascending"):
        CostTable([2, 1], [0.1, 0.1])

"""The acceptance model is calibrated, monotone in the gap, and isolates bad sequences."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec.engine.drafting.acceptance import AcceptanceModel


def predicted(
    model: AcceptanceModel, gaps: list[float], *, row: int = 0, rank: int = 0, depth: int = 1
) -> npt.NDArray[np.float32]:
    n = len(gaps)
    rows, depths, ranks = (np.full(n, value, np.int32) for value in (row, depth, rank))
    return model.predict("model", rows, depths, ranks, np.array(gaps, np.float32))


def feed(
    model: AcceptanceModel, rows: list[int], chance: float, *, steps: int, seed: int = 0, gap: float = 1.2
) -> None:
    random = np.random.default_rng(seed)
    table_rows = np.repeat(np.array(rows, np.int32), 6)
    n = len(table_rows)
    ones = np.ones(n, np.int32)
    for _ in range(steps):
        gaps = np.full(n, gap, np.float32)
        model.observe("model", table_rows, ones, ones * 0, gaps, random.random(n) < chance)


def test_it_learns_the_truth_of_every_gap_and_reports_it() -> None:
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
    of_second = [0.3 * np.exp(-0.6 * gap) for gap in gaps]
    for rank_asked, expected in ((0, of_best), (1, of_second)):
        of_rows = np.mean([predicted(model, gaps, row=row, rank=rank_asked) for row in range(8)], axis=0)
        assert of_rows == pytest.approx(expected, abs=0.05)
    assert model.calibration_error() < 0.02
    for row in model.calibration():
        assert row.count < 100 or row.real == pytest.approx(row.predicted, abs=0.08)


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 4), st.integers(1, 5), st.booleans()), min_size=1, max_size=60)
)
def test_predictions_are_chances_whatever_was_seen(seen: list[tuple[float, int, int, bool]]) -> None:
    model = AcceptanceModel(2)
    gap, rank, depth, accepted = (np.array(column) for column in zip(*seen, strict=True))
    rows = np.zeros(len(gap), np.int32)
    for _ in range(3):
        model.observe(
            "model", rows, depth.astype(np.int32), rank.astype(np.int32), gap.astype(np.float32), accepted.astype(bool)
        )
    grid = np.linspace(0, 40, 200).tolist()
    for depth_asked in (1, 2, 7):
        for rank_asked in (0, 1, 5):
            chances = predicted(model, grid, rank=rank_asked, depth=depth_asked)
            assert ((chances > 0) & (chances < 1)).all()


def test_one_bad_sequence_poisons_no_other() -> None:
    model = AcceptanceModel(4)
    feed(model, [0, 1, 2], 0.8, steps=60)
    feed(model, [3], 0.1, steps=60)  # alone, as in a long tail
    assert predicted(model, [1.2], row=3) == pytest.approx([0.1], abs=0.1)
    assert predicted(model, [1.2], row=0)[0] > 0.68
    model.forget(3)
    assert predicted(model, [1.2], row=3)[0] > 0.65, "the next sequence in the row must not inherit the bad tail"


def test_what_all_sequences_show_is_learnt_for_the_next_ones() -> None:
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
    model = AcceptanceModel(1)
    chances = predicted(model, [float("nan"), float("inf"), -3.0, 1e30], row=7)
    assert ((chances > 0) & (chances < 1)).all()
    model.forget(100)
    empty = np.empty(0, np.int32)
    model.observe("model", empty, empty, empty, empty.astype(np.float32), empty.astype(bool))
    assert len(model.predict("model", empty, empty, empty, empty.astype(np.float32))) == 0


def test_drafters_are_learnt_apart() -> None:
    model = AcceptanceModel(2)
    feed(model, [0], 0.02, steps=100)
    other = model.predict(
        "suffix", np.zeros(1, np.int32), np.ones(1, np.int32), np.zeros(1, np.int32), np.full(1, 1.2, np.float32)
    )
    assert other[0] > 0.6
    assert {row.drafter for row in model.calibration()} == {"model"}

"""Learning of step costs, remaining lengths, and prompts with long answers."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec.moves.rebalancing.curve import LearnedCurve
from rlhfspec.moves.rebalancing.residual import Residual, mean_residual_life

STEP, SEQUENCE = 8.8e-3, 0.37e-3


def learnt(
    rows: np.ndarray, *, prior: tuple[float, float] = (8.0, 1.0), noise: float = 0.1, seed: int = 0
) -> LearnedCurve:
    rng = np.random.default_rng(seed)
    curve = LearnedCurve(prior)
    for number in rows.tolist():
        curve.learn(number, (STEP + SEQUENCE * number) * rng.lognormal(0, noise))
    return curve


def test_a_curve_is_found_through_noise_and_steps_in_which_the_process_was_stopped() -> None:
    rows = np.random.default_rng(1).integers(1, 64, 600)
    curve = learnt(rows)
    for _ in range(3):
        curve.learn(20, 5.0)
    assert curve.step_seconds == pytest.approx(STEP, rel=0.35)
    assert curve.sequence_seconds == pytest.approx(SEQUENCE, rel=0.35)
    assert curve.seconds(32) == pytest.approx(STEP + SEQUENCE * 32, rel=0.15)


@pytest.mark.parametrize("number", [1, 8, 64])
def test_who_only_ever_saw_one_b_takes_the_shape_from_the_fleet(number: int) -> None:
    slow = 3.0  # a machine that is slower than the fleet
    curve = LearnedCurve((STEP / slow, SEQUENCE / slow))
    for _ in range(500):
        curve.learn(number, STEP + SEQUENCE * number)
    assert curve.step_seconds == pytest.approx(STEP, rel=1e-6)
    assert curve.sequence_seconds == pytest.approx(SEQUENCE, rel=1e-6)


def test_it_forgets() -> None:
    curve = learnt(np.arange(1, 65).repeat(8))
    for number in np.arange(1, 65).repeat(16).tolist():
        curve.learn(number, 2 * (STEP + SEQUENCE * number))
    assert curve.seconds(20) == pytest.approx(2 * (STEP + SEQUENCE * 20), rel=0.1)


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e3)), max_size=60))
@settings(deadline=None)
def test_no_curve_is_below_0(points: list[tuple[float, float]]) -> None:
    curve = LearnedCurve()
    for number, seconds in points:
        curve.learn(number, seconds)
        assert math.isfinite(curve.step_seconds)
        assert curve.step_seconds >= 0
        assert curve.sequence_seconds >= 0


def test_a_prefill_in_which_the_process_was_stopped_is_no_news() -> None:
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


def test_until_lengths_were_seen_half_of_what_can_come_is_expected() -> None:
    residual = Residual()
    assert residual.remaining([0, 500], [1.0, 1.0], [1000, 500]).tolist() == [500.0, 250.0]


def test_a_prompts_factor_scales_what_is_expected_and_the_limit_holds() -> None:
    residual = Residual()
    for length in np.random.default_rng(0).lognormal(math.log(128), 1, 2000).tolist():
        residual.learn(int(length))
    short, usual, long = residual.remaining([10] * 3, [0.5, 1.0, 2.0], [10_000] * 3).tolist()
    assert short < usual < long
    assert residual.remaining([10], [1.0], [7]).tolist() == [7.0]
    # of a lognormal, who got far has far to go
    assert residual.remaining([400], [1.0], [10_000])[0] > residual.remaining([100], [1.0], [10_000])[0]

"""The simulator equals its slow twin and known results of policies."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from twins.simulator import simulate_slowly

from rlhfspec.errors import InvalidRequest
from rlhfspec.simulator.calibrate import as_spans, calibrate
from rlhfspec.simulator.lengths import LengthShape, Workload, workload
from rlhfspec.simulator.policies import POLICY_NAMES, policy_named
from rlhfspec.simulator.scenario import Kill, Policy, Scenario, StageOutcome
from rlhfspec.simulator.simulator import simulate
from rlhfspec.simulator.step_curves import PRESETS
from rlhfspec.simulator.trials import trials

SMALL = LengthShape(median=20, limit=60, samples_per_prompt=4, shortest_prompt=1, longest_prompt=9)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    count = draw(st.integers(1, 5))
    when = {"at_seconds": st.floats(0, 0.3), "back_after_seconds": st.floats(0.01, 0.2)}
    kill = st.builds(Kill, generator=st.integers(0, count - 1), **when)
    kills = draw(st.lists(kill, max_size=3, unique_by=lambda kill: kill.generator))
    return Scenario(
        num_generators=count,
        curve=PRESETS[draw(st.sampled_from(["plain", "adaptive", "t0=2.5c", "memory-bound"]))],
        rows=draw(st.integers(2, 12)),
        pulls=draw(st.booleans()),
        prefetch=draw(st.integers(0, 3)),
        piece=draw(st.integers(1, 2)),
        prefill_seconds=draw(st.sampled_from([0.0, 5e-4])),
        shares_prefixes=draw(st.booleans()),
        engines_per_host=draw(st.integers(1, 3)),
        slowness=draw(st.sampled_from([(), ((0, 2.0),)])),
        kills=tuple(kills),
        redelivery_seconds=0.05,
        plan_seconds=draw(st.sampled_from([0.01, 0.04])),
        pause_seconds=draw(st.sampled_from([0.0, 0.003, 0.05])),
        move_seconds=draw(st.sampled_from([0.0, 0.0003])),
    )


def random_policy(seed: int) -> Policy:
    random = np.random.default_rng(seed)

    def policy(snapshot, now):  # type: ignore[no-untyped-def]
        count = min(len(snapshot.ids), 3)
        chosen = random.choice(len(snapshot.ids), count, replace=False) if count else np.zeros(0, dtype=int)
        chosen = np.argsort(snapshot.ids, kind="stable")[chosen]  # by name: at one time the order is nobody's
        return chosen, random.integers(0, len(snapshot.free_rows), count)

    return policy


def policy_of(name: str, work: Workload, seed: int) -> Policy | None:
    return random_policy(seed) if name == "random" else policy_named(name, work)


def told(outcome: StageOutcome) -> tuple[object, ...]:
    counts = (outcome.num_refused, outcome.num_plans, outcome.num_redelivered)
    return (outcome.seconds, outcome.ended.tolist(), outcome.ended_on.tolist(), outcome.moves, *counts)


@settings(max_examples=60, deadline=None)
@given(
    scenario=scenarios(),
    kind=st.sampled_from(["independent", "groups", "skew", "adversarial"]),
    policy=st.sampled_from([*POLICY_NAMES, "random"]),
    seed=st.integers(0, 1000),
)
def test_simulation_by_events_equals_that_by_steps(scenario: Scenario, kind: str, policy: str, seed: int) -> None:
    work = workload(kind, num_generators=scenario.num_generators, per_generator=8, seed=seed, shape=SMALL)
    slow = simulate_slowly(scenario, work, policy_of(policy, work, seed))
    fast = simulate(scenario, work, policy_of(policy, work, seed))
    assert told(fast) == told(slow)
    assert (fast.ended > 0).all()


def by_hand(lengths: list[list[int]], *, limit: int = 100) -> Workload:
    flat = np.array([length for hand in lengths for length in hand])
    dealt, tokens = np.repeat(np.arange(len(lengths)), [len(hand) for hand in lengths]), np.full(len(flat), 10)
    return Workload(lengths=flat, prompt_tokens=tokens, prompts=np.arange(len(flat)), dealt=dealt, limit=limit)


def test_an_engine_that_ends_speeds_up_the_next_step_of_its_neighbour() -> None:
    scenario = Scenario(num_generators=2, curve=PRESETS["plain"], engines_per_host=2)
    work = by_hand([[5, 5], [6, 9]])
    curve = PRESETS["plain"]
    busy, alone, last = curve.seconds(2, busy_share=1.0), curve.seconds(2), curve.seconds(1)
    assert simulate(scenario, work).seconds == pytest.approx(5 * busy + alone + 3 * last, abs=1e-8)
    assert told(simulate(scenario, work)) == told(simulate_slowly(scenario, work))


def test_the_seconds_of_a_stage_follow_the_cost_formula() -> None:
    """The time is t0 * longest + c * sum + prefill of the generator that ends last."""
    scenario = Scenario(num_generators=2, curve=PRESETS["t0=2.5c"], prefill_seconds=1e-3)
    seconds = simulate(scenario, by_hand([[7, 30], [8, 20, 20]])).seconds
    assert seconds == pytest.approx(max(1.25e-3 * 30 + 0.5e-3 * 37 + 0.02, 1.25e-3 * 20 + 0.5e-3 * 48 + 0.03), abs=1e-8)


def test_samples_of_a_dead_generator_are_redelivered_to_the_living() -> None:
    kills = (Kill(generator=0, at_seconds=0.01),)
    scenario = Scenario(num_generators=2, curve=PRESETS["t0=2.5c"], kills=kills, redelivery_seconds=0.1)
    outcome = simulate(scenario, by_hand([[50, 60], [5]]))
    assert outcome.num_redelivered == 2
    assert outcome.ended_on.tolist() == [1, 1, 1]
    assert outcome.seconds == pytest.approx(0.11 + 1.25e-3 * 60 + 0.5e-3 * 110, abs=1e-8)


def test_a_fleet_whose_generators_are_all_dead_is_refused() -> None:
    scenario = Scenario(num_generators=1, curve=PRESETS["t0=2.5c"], kills=(Kill(generator=0, at_seconds=0.01),))
    with pytest.raises(InvalidRequest, match="every generator is dead"):
        simulate(scenario, by_hand([[50]]), policy_named("ours", by_hand([[50]])))


def stage(curve: str, **more: object) -> Scenario:
    return replace(Scenario(num_generators=64, curve=PRESETS[curve], prefill_seconds=5e-4), **more)  # type: ignore[arg-type]


def lengths(kind: str, count: int = 64, per_generator: int = 32) -> Callable[[int], Workload]:
    return lambda seed: workload(kind, num_generators=count, per_generator=per_generator, seed=seed)


@pytest.mark.parametrize("kind", ["independent", "groups"])
def test_64_generators_that_are_half_memory_bound_end_within_a_tenth_of_the_clairvoyant(kind: str) -> None:
    [ours] = trials(stage("t0=32c"), lengths(kind), policies=("ours",), seeds=(1, 2))
    assert max(ours.of_clairvoyant) <= 1.10


@pytest.mark.parametrize("kind", ["independent", "groups"])
def test_64_work_bound_generators_end_as_if_work_were_shared_and_no_later_than_by_anothers_rules(kind: str) -> None:
    policies = ("ours", "none", "threshold", "knee", "counts")
    ours, *others = trials(stage("t0=2.5c"), lengths(kind), policies=policies, seeds=(1, 2))
    assert max(ours.of_ideal) <= 1.03
    assert ours.mean_seconds <= 1.02 * min(other.mean_seconds for other in others)  # equal counts: within noise
    assert ours.mean_seconds < 0.98 * min(other.mean_seconds for other in others if other.policy != "counts")


def test_memory_bound_generators_move_nothing() -> None:
    for kind in ("independent", "groups", "skew", "adversarial"):
        [ours] = trials(stage("memory-bound"), lengths(kind), policies=("ours",), seeds=(1, 2))
        assert ours.moves_per_sequence == 0, kind


@pytest.mark.parametrize("curve", ["plain", "adaptive"])
def test_moves_between_two_engines_of_one_host_cost_at_most_3_percent(curve: str) -> None:
    scenario = stage(curve, num_generators=2, engines_per_host=2)
    policies = ("ours", "none", "pull+none")
    ours, dealt, pulled = trials(scenario, lengths("independent", 2), policies=policies, seeds=range(1, 9))
    best = np.minimum(dealt.seconds, pulled.seconds)
    assert float(np.median(np.array(ours.seconds) / best)) <= 1.03


def test_adversarial_lengths_do_not_cause_swings() -> None:
    """The run has some 200,000 steps; `python bench/simulated_bars.py swings` runs a million."""
    for curve in ("adaptive", "t0=2.5c", "t0=32c"):
        [ours] = trials(stage(curve), lengths("adversarial"), policies=("ours",), seeds=(1, 2))
        assert ours.most_moves <= 8
        assert ours.num_swings <= 2


@pytest.mark.parametrize("count", [2, 300, pytest.param(10_000, marks=pytest.mark.whole("ten thousand generators"))])
def test_our_policy_costs_little_from_two_to_ten_thousand_generators(count: int) -> None:
    scenario = Scenario(num_generators=count, curve=PRESETS["t0=2.5c"])
    dealt, ours = trials(scenario, lengths("groups", count, 2), policies=("none", "ours"), seeds=(1,))
    assert ours.mean_seconds <= dealt.mean_seconds * 1.03


def test_a_calibrated_simulation_reproduces_the_time_of_a_run() -> None:
    scenario = Scenario(num_generators=4, curve=PRESETS["t0=2.5c"], prefill_seconds=5e-4)
    work = workload("groups", num_generators=4, per_generator=32, seed=1)
    found = calibrate(as_spans(scenario, work))
    again = simulate(replace(scenario, curve=found.curve, prefill_seconds=found.prefill_seconds), work)
    assert again.seconds == pytest.approx(simulate(scenario, work).seconds, rel=0.05)
    assert found.error < 0.05

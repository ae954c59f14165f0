"""The simulator against its slow twin, and what it says of policies where that is known beforehand."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec.rebalancing.lengths import Shape, Workload, workload
from rlhfspec.rebalancing.policies import NAMES, policy_named
from rlhfspec.rebalancing.scenario import Kill, Outcome, Policy, Scenario
from rlhfspec.rebalancing.simulator import simulate
from rlhfspec.rebalancing.simulator_oracle import simulate_slowly
from rlhfspec.rebalancing.step_curves import PRESETS

SMALL = Shape(median=20, limit=60, samples_per_prompt=4, shortest_prompt=1, longest_prompt=9)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    count = draw(st.integers(1, 5))
    kills = draw(
        st.lists(
            st.builds(
                Kill,
                generator=st.integers(0, count - 1),
                at_seconds=st.floats(0, 0.3),
                back_after_seconds=st.floats(0.01, 0.2),
            ),
            max_size=3,
            unique_by=lambda kill: kill.generator,
        )
    )
    return Scenario(
        num_generators=count,
        curve=PRESETS[draw(st.sampled_from(["plain", "adaptive", "t0=2.5c", "memory-bound"]))],
        rows=draw(st.integers(2, 12)),
        pulls=draw(st.booleans()),
        prefetch=draw(st.integers(0, 3)),
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
    """Anything to anywhere: what a policy must not be able to break."""
    random = np.random.default_rng(seed)

    def policy(snapshot, now):  # type: ignore[no-untyped-def]
        count = min(len(snapshot.ids), 3)
        chosen = random.choice(len(snapshot.ids), count, replace=False) if count else np.zeros(0, dtype=int)
        return chosen, random.integers(0, len(snapshot.free_rows), count)

    return policy


def policy_of(name: str, work: Workload, seed: int) -> Policy | None:
    return random_policy(seed) if name == "random" else policy_named(name, work)


def told(outcome: Outcome) -> tuple[object, ...]:
    return (
        outcome.seconds,
        outcome.ended.tolist(),
        outcome.ended_on.tolist(),
        outcome.moves,
        outcome.num_refused,
        outcome.num_plans,
        outcome.num_redelivered,
    )


@settings(max_examples=60, deadline=None)
@given(
    scenario=scenarios(),
    kind=st.sampled_from(["independent", "groups", "skew", "adversarial"]),
    policy=st.sampled_from([*NAMES, "random"]),
    seed=st.integers(0, 1000),
)
def test_events_do_what_single_steps_do(scenario: Scenario, kind: str, policy: str, seed: int) -> None:
    work = workload(kind, num_generators=scenario.num_generators, per_generator=8, seed=seed, shape=SMALL)
    slow = simulate_slowly(scenario, work, policy_of(policy, work, seed))
    fast = simulate(scenario, work, policy_of(policy, work, seed))
    assert told(fast) == told(slow)
    assert (fast.ended > 0).all()

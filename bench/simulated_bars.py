"""Print tables of simulated stages: `python bench/simulated_bars.py [table|swings|large]...`, by default all.

No engine runs: lengths are synthetic, curves measured or assumed.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from rlhfspec.simulator.lengths import workload
from rlhfspec.simulator.policies import policy_named
from rlhfspec.simulator.scenario import Scenario
from rlhfspec.simulator.simulator import simulate
from rlhfspec.simulator.step_curves import PRESETS
from rlhfspec.simulator.trials import PolicyTrial, trials

PREFILL_SECONDS = 5e-4
POLICIES = ("none", "threshold", "knee", "counts", "ours", "ours-knowing")
ON_ONE_HOST = ("none", "pull+none", "counts", "ours", "pull+ours")


def stage(count: int, curve: str, **more: int) -> Scenario:
    scenario = Scenario(
        num_generators=count, curve=PRESETS[curve], prefill_seconds=PREFILL_SECONDS, prefetch=4, piece=4
    )
    return replace(scenario, **more)  # type: ignore[arg-type]


def rows(scenario: Scenario, kind: str, policies: tuple[str, ...], num_seeds: int) -> None:
    count = scenario.num_generators

    def lengths(seed: int):  # type: ignore[no-untyped-def]
        return workload(kind, num_generators=count, per_generator=32, seed=seed)

    found = trials(scenario, lengths, policies=policies, seeds=range(1, num_seeds + 1))
    hosts = f", {scenario.engines_per_host} a host" if scenario.engines_per_host > 1 else ""
    print(f"| {scenario.curve.name} | {count}{hosts} | {kind} |", " | ".join(map(cell, found)), "|", flush=True)


def cell(trial: PolicyTrial) -> str:
    content = trial.content()
    ideal = content["of_ideal_sharing"]
    return f"{content['of_clairvoyant']:.3f} / {ideal:.3f} ({trial.moves_per_sequence:.2f})"


def table() -> None:
    print("makespan / clairvoyant, / ideal sharing (moves a sequence); means over seeds")
    print("| curve | generators | lengths |", " | ".join(POLICIES), "|")
    for curve in ("t0=32c", "t0=2.5c", "adaptive", "plain", "memory-bound"):
        for kind in ("independent", "groups", "skew"):
            rows(stage(64, curve), kind, POLICIES, 8)
    for count, num_seeds in ((2, 40), (8, 20)):
        for curve in ("t0=32c", "t0=2.5c"):
            rows(stage(count, curve), "groups", POLICIES, num_seeds)
    print("| curve | generators | lengths |", " | ".join(ON_ONE_HOST), "|")
    for curve in ("plain", "adaptive"):
        for kind in ("independent", "groups", "skew"):
            rows(stage(2, curve, engines_per_host=2), kind, ON_ONE_HOST, 20)


def swings() -> None:
    """Simulate at least a million generator steps with adversarial lengths, and print moves and swings."""
    num_steps = num_swings = most = moves = sequences = seed = 0
    while num_steps < 1_000_000:
        for curve in ("adaptive", "t0=2.5c", "t0=32c"):
            seed += 1
            work = workload("adversarial", num_generators=64, per_generator=32, seed=seed)
            outcome = simulate(stage(64, curve), work, policy_named("ours", work))
            # a generator makes at least as many steps as its longest sequence has tokens
            num_steps += sum(int(work.lengths[outcome.ended_on == place].max(initial=0)) for place in range(64))
            num_swings += outcome.num_swings
            times: dict[int, int] = {}
            for move in outcome.moves:
                times[move.sequence] = times.get(move.sequence, 0) + 1
            most, moves, sequences = (
                max(most, *times.values()),
                moves + len(outcome.moves),
                sequences + len(work.lengths),
            )
    print(f"{num_steps} steps, {seed} stages, {sequences} sequences:", end=" ")
    print(f"{moves} moves, at most {most} of one, {num_swings} swings")


def large() -> None:
    for count, per_generator in ((2, 32), (64, 32), (1000, 100), (10_000, 100)):
        work = workload("groups", num_generators=count, per_generator=per_generator, seed=1)
        for name in ("none", "ours"):
            began = time.perf_counter()
            outcome = simulate(stage(count, "t0=2.5c"), work, policy_named(name, work))
            took = time.perf_counter() - began
            print(f"{count} x {per_generator}, {name}: {outcome.seconds:.2f} s simulated in {took:.1f} s,", end=" ")
            print(f"{len(outcome.moves)} moves, {outcome.num_plans} plans", flush=True)


if __name__ == "__main__":
    for wanted in sys.argv[1:] or ["table", "swings", "large"]:
        {"table": table, "swings": swings, "large": large}[wanted]()

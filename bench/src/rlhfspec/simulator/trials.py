"""Comparison of policies over several seeds: the table of `rlhfspec simulate`.

Example:
    >>> scenario = Scenario(num_generators=4, curve=PRESETS["t0=2.5c"])
    >>> lengths = lambda seed: workload("groups", num_generators=4, per_generator=16, seed=seed)
    >>> none, ours = trials(scenario, lengths, policies=("none", "ours"), seeds=range(2))
    >>> ours.mean_seconds < none.mean_seconds, none.moves_per_sequence
    (True, 0.0)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlhfspec.moves.rebalancing.fleet import STANDARD, PlannerSettings
from rlhfspec.simulator.lengths import Workload, workload
from rlhfspec.simulator.policies import policy_named
from rlhfspec.simulator.references import clairvoyant_seconds, ideal_sharing_seconds
from rlhfspec.simulator.scenario import Scenario, StageOutcome
from rlhfspec.simulator.simulator import simulate
from rlhfspec.simulator.step_curves import PRESETS

__all__ = ["PRESETS", "PolicyTrial", "Scenario", "trials", "workload"]
_EARLIER = 1_000_000  # seed offset of the step that `ours` learnt from, above any requested seed


@dataclass(slots=True, kw_only=True)
class PolicyTrial:
    """Results of one policy over seeds. Ratios to clairvoyant or ideal seconds without a value are nan."""

    policy: str
    pulls: bool
    seconds: list[float] = field(default_factory=list)
    of_clairvoyant: list[float] = field(default_factory=list)
    of_ideal: list[float] = field(default_factory=list)
    moves_per_sequence: float = 0.0  # mean over seeds
    most_moves: int = 0  # of one sequence
    num_swings: int = 0
    num_redelivered: int = 0
    tokens_per_second: float = 0.0

    @property
    def mean_seconds(self) -> float:
        return float(np.mean(self.seconds))

    def content(self) -> dict[str, Any]:
        """Return the trial as JSON content, with null for nan."""
        ratios = {
            name: None if np.isnan(values).any() else round(float(np.mean(values)), 4)
            for name, values in (("of_clairvoyant", self.of_clairvoyant), ("of_ideal_sharing", self.of_ideal))
        }
        return {
            "policy": self.policy,
            "pulls": self.pulls,
            "seconds": [round(seconds, 6) for seconds in self.seconds],
            "mean_seconds": round(self.mean_seconds, 6),
            **ratios,
            "moves_per_sequence": round(self.moves_per_sequence, 4),
            "most_moves_of_a_sequence": self.most_moves,
            "swings": self.num_swings,
            "redelivered": self.num_redelivered,
            "tokens_per_second": round(self.tokens_per_second, 1),
        }


def trials(
    scenario: Scenario,
    lengths: Callable[[int], Workload],
    *,
    policies: Sequence[str],
    seeds: Iterable[int],
    settings: PlannerSettings = STANDARD,
    on_outcome: Callable[[str, int, StageOutcome, Workload], None] | None = None,
) -> list[PolicyTrial]:
    """Simulate every policy on every seed's workload; with `pull+` before its name, generators pull prompts."""
    found = [PolicyTrial(policy=name, pulls=_pulls(name, scenario)) for name in policies]
    all_seeds = list(seeds)
    for seed in all_seeds:
        work, history = lengths(seed), lengths(seed + _EARLIER).lengths
        best, ideal = clairvoyant_seconds(scenario, work), ideal_sharing_seconds(scenario, work)
        for trial in found:
            policy = policy_named(trial.policy.removeprefix("pull+"), work, history=history, settings=settings)
            where = replace(scenario, pulls=trial.pulls)
            outcome = simulate(where, work, policy, records=on_outcome is not None)
            _count(trial, outcome, work, len(all_seeds))
            trial.of_clairvoyant.append(outcome.seconds / best)
            trial.of_ideal.append(outcome.seconds / ideal)
            if on_outcome is not None:
                on_outcome(trial.policy, seed, outcome, work)
    return found


def _pulls(name: str, scenario: Scenario) -> bool:
    return scenario.pulls or name.startswith("pull+")


def _count(trial: PolicyTrial, outcome: StageOutcome, work: Workload, num_seeds: int) -> None:
    trial.seconds.append(outcome.seconds)
    trial.moves_per_sequence += len(outcome.moves) / work.num_sequences / num_seeds
    trial.tokens_per_second += outcome.num_tokens / outcome.seconds / num_seeds
    moves = Counter(move.sequence for move in outcome.moves)
    trial.most_moves = max(trial.most_moves, max(moves.values(), default=0))
    trial.num_swings += outcome.num_swings
    trial.num_redelivered += outcome.num_redelivered

"""Benefit of trees and the global budget: tokens per verification at the same number of verified nodes.

A chain spends n nodes on every sequence. A global budget drafts more than it verifies, and verifies the most promising
nodes of the batch, n per sequence on average. No clock is involved, so a busy machine does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from rlhfspec.bench.generating.ours import drain, requests_of
from rlhfspec.bench.generating.scenarios import BenchScenario
from rlhfspec.bench.tables import mark, table_of
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.engine.drafting.fixed import FixedSelector

NODES = (4, 8, 32)
WANTED_GAIN = {4: 1.05, 8: 1.05, 32: 1.10}
TREE_SLOTS = 256  # a surely predicted sequence may get several times its share
# (depth, width, branch) drafted before the budget prunes: narrow and deep where the draft is good, wide where it is not
_SHAPES = {4: ((8, 2, 3), (10, 3, 3)), 8: ((12, 3, 3), (16, 2, 2)), 32: ((64, 2, 2), (96, 2, 2), (96, 2, 3))}
LEARNING_RUNS = 1  # before anything is counted
COUNTED_RUNS = 3  # each with its own seeds; one alone swings by two percent


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeGain:
    """Gain of the best `tree` shape over a chain at `num_nodes` verified nodes per sequence."""

    num_nodes: int
    chain_tokens: float  # per verification
    tree_tokens: float
    tree: str

    @property
    def gain(self) -> float:
        return self.tree_tokens / self.chain_tokens

    @property
    def holds(self) -> bool:
        return self.gain >= WANTED_GAIN[self.num_nodes]


def tree_gains(engine: Any, scenario: BenchScenario) -> list[TreeGain]:
    return [_gain(engine, scenario, num_nodes) for num_nodes in NODES]


def render(gains: list[TreeGain]) -> Table:
    columns = ("", "nodes a sequence", "chain for each", "global budget", "gain", "wanted", "tree")
    table = table_of("tokens per verification at the same number of nodes", columns, left=("", "tree"))
    for gain in gains:
        table.add_row(
            mark(gain.holds),
            str(gain.num_nodes),
            f"{gain.chain_tokens:.2f}",
            f"{gain.tree_tokens:.2f}",
            f"{gain.gain - 1:+.1%}",
            f"{WANTED_GAIN[gain.num_nodes] - 1:+.0%}",
            gain.tree,
        )
    return table


def _gain(engine: Any, scenario: BenchScenario, num_nodes: int) -> TreeGain:
    chain = DraftPlan(drafter="model", depth=num_nodes)
    trees = [
        DraftPlan(drafter="model", depth=depth, width=width, branch=branch, max_nodes=num_nodes)
        for depth, width, branch in _SHAPES[num_nodes]
    ]
    measured = {plan.name: tokens_per_verification(engine, scenario, plan) for plan in (chain, *trees)}
    best = max((plan.name for plan in trees), key=measured.__getitem__)
    return TreeGain(num_nodes=num_nodes, chain_tokens=measured[chain.name], tree_tokens=measured[best], tree=best)


def tokens_per_verification(engine: Any, scenario: BenchScenario, plan: DraftPlan) -> float:
    """Return the mean tokens per verification over runs after one that trains the acceptance model."""
    speculation = engine.speculation
    engine.set_speculation(plan)
    speculation.selector = FixedSelector(plan, acceptance=speculation.acceptance)
    num_verifications = num_accepted = 0
    for repetition in range(LEARNING_RUNS + COUNTED_RUNS):
        arguments = {
            "prompts": scenario.prompts,
            "max_tokens": scenario.max_tokens,
            "seeds": scenario.seeds(repetition),
        }
        completions = drain(engine, requests_of(arguments, f"{plan.name}-{repetition}"))
        if repetition >= LEARNING_RUNS:
            num_verifications += sum(completion.stats.num_verifications for completion in completions)
            num_accepted += sum(completion.stats.num_accepted for completion in completions)
    return 1.0 + num_accepted / num_verifications

"""Explanation of a selector's decisions on one batch: predictions and outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rlhfspec.bench.generating.ours import drain, requests_of
from rlhfspec.bench.generating.scenarios import BenchScenario
from rlhfspec.bench.tables import table_of
from rlhfspec.engine.drafting.acceptance import AcceptanceModel, Decile
from rlhfspec.engine.drafting.journal import Decision, Explanation
from rlhfspec.messages.records.models import Drafting
from rlhfspec.runs.view.text import shares


def observe(engine: Any, scenario: BenchScenario) -> tuple[Explanation, AcceptanceModel, tuple[Drafting, ...]]:
    """Run the scenario after a warm-up; return the selector's decisions, the acceptance model and each drafter."""
    for repetition, name in enumerate(("warm-up", "observed")):
        arguments = {
            "prompts": scenario.prompts,
            "max_tokens": scenario.max_tokens,
            "seeds": scenario.seeds(repetition),
        }
        drain(engine, requests_of(arguments, name))
    return engine.speculation.selector.explain(), engine.speculation.acceptance, engine.speculation.drafting()


def render(
    explanation: Explanation, acceptance: AcceptanceModel, drafting: tuple[Drafting, ...], *, num_decisions: int
) -> Group:
    return Group(
        _decisions(explanation.decisions[-num_decisions:]),
        _drafters(drafting),
        _rates(explanation.rates),
        _calibration(acceptance.calibration()),
        _errors(explanation, acceptance.calibration_error()),
    )


def _decisions(decisions: tuple[Decision, ...]) -> Table:
    columns = ("batch", "chosen", "drafted", "N", "accepted", "step ms", "selector us")
    table = table_of("decisions: predicted → real", columns, left=("chosen",))
    for decision in decisions:
        table.add_row(
            str(decision.num_sequences) + (f"+{decision.num_prefill_rows}" if decision.num_prefill_rows else ""),
            decision.plan + (" (trial)" if decision.is_trial else ""),
            str(decision.num_proposed),
            str(decision.num_verified),
            f"{decision.predicted_accepted:.1f} → {decision.accepted}",
            f"{1000 * decision.predicted_seconds:.1f} → {1000 * decision.seconds:.1f}",
            f"{1e6 * decision.selector_seconds:.0f}",
        )
    return table


def _drafters(drafting: tuple[Drafting, ...]) -> Table:
    columns = ("drafter", "accepted by depth", "a level / a verification", "tokens a verification", "saved s")
    table = table_of("drafters since the start", columns, left=columns[:1])
    for each in drafting:
        level = "-" if each.level_share is None else shares([each.level_share])
        tokens, saved = f"{each.tokens_per_verification:.2f}", f"{each.saved_seconds:.1f}"
        table.add_row(each.drafter, shares(each.acceptance), level, tokens, saved)
    return table


def _rates(rates: Mapping[str, float]) -> Table:
    table = table_of("the plans as they looked last, best first", ("plan", "tokens/s"), left=("plan",))
    for plan, rate in rates.items():
        table.add_row(plan, f"{rate:.0f}")
    return table


def _calibration(deciles: tuple[Decile, ...]) -> Table:
    columns = ("drafter", "predicted", "nodes", "mean", "real")
    table = table_of("acceptance by predicted decile", columns, left=columns[:1])
    for row in deciles:
        tenth = f"{row.tenth / 10:.1f}-{(row.tenth + 1) / 10:.1f}"
        table.add_row(row.drafter, tenth, f"{row.count:.0f}", f"{row.predicted:.3f}", f"{row.real:.3f}")
    return table


def _errors(explanation: Explanation, calibration_error: float) -> Text:
    costs = ", ".join(f"{kind} {share:.0%}" for kind, share in explanation.cost_errors.items())
    return Text(
        f"seconds, mean absolute error: {costs}\n"
        f"acceptance, expected calibration error: {calibration_error:.3f}\n"
        f"selector's share of step time: {explanation.share_of_step:.2%}"
    )

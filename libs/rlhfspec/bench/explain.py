"""What the selector thinks: for one batch, every decision with what was predicted and what came."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfspec.bench.ours import drain, requests_of
from rlhfspec.bench.scenarios import Scenario


def observe(engine: Any, scenario: Scenario) -> tuple[Any, Any]:
    """Generate the scenario on a warm engine; the selector's explanation and the acceptance calibration after it."""
    for repetition, name in enumerate(("warm-up", "observed")):
        arguments = {
            "prompts": scenario.prompts,
            "max_tokens": scenario.max_tokens,
            "seeds": scenario.seeds(repetition),
        }
        drain(engine, requests_of(arguments, name))
    return engine.speculation.selector.explain(), engine.speculation.acceptance.calibration()


def render(explanation: Any, calibration: Any, *, num_decisions: int) -> Group:
    parts: list[RenderableType] = [
        _decisions(explanation.decisions[-num_decisions:]),
        _options(explanation.options),
        _calibration(calibration),
        _errors(explanation, calibration),
    ]
    parts += [
        Text(f"watchdog: {event.drafter} paused at step {event.step}, gain {event.gain:.2f}", style="yellow")
        for event in explanation.events
    ]
    return Group(*parts)


def _decisions(decisions: tuple[Any, ...]) -> Table:
    table = Table(title="decisions: predicted → real", title_style="bold")
    for name in ("step", "batch", "chosen", "runner-up", "drafted", "N"):
        table.add_column(name, justify="left" if name in ("chosen", "runner-up") else "right")
    for name in ("accepted", "draft ms", "verify ms", "step ms", "tokens/s", "selector us"):
        table.add_column(name, justify="right")
    for decision in decisions:
        table.add_row(
            str(decision.step),
            str(decision.num_sequences) + (f"+{decision.num_prefill_rows}" if decision.num_prefill_rows else ""),
            decision.plan + (" (probe)" if decision.is_probe else ""),
            decision.runner_up,
            str(decision.num_proposed),
            str(decision.num_verified),
            f"{decision.predicted_accepted:.1f} → {decision.accepted}",
            _milliseconds(decision.predicted_draft_seconds, decision.draft_seconds),
            _milliseconds(decision.predicted_verify_seconds, decision.verify_seconds),
            _milliseconds(decision.predicted_seconds, decision.seconds),
            f"{decision.tokens_per_second:.0f}",
            f"{1e6 * decision.selector_seconds:.0f}",
        )
    return table


def _options(options: tuple[Any, ...]) -> Table:
    table = Table(title="the plans as they looked at the last batch, best first", title_style="bold")
    table.add_column("plan")
    for name in ("tokens/s", "tokens a step", "N", "ms"):
        table.add_column(name, justify="right")
    for option in options[:10]:
        table.add_row(
            option.plan,
            f"{option.tokens_per_second:.0f}",
            f"{option.num_tokens:.1f}",
            f"{option.num_verified:.0f}",
            f"{1000 * option.seconds:.2f}",
        )
    return table


def _calibration(calibration: Any) -> Table:
    table = Table(title="acceptance by predicted decile", title_style="bold")
    for name in ("drafter", "group", "nodes", "predicted", "real"):
        table.add_column(name, justify="left" if name in ("drafter", "group") else "right")
    for row in calibration.deciles:
        table.add_row(row.drafter, row.group, f"{row.count:.0f}", f"{row.predicted:.3f}", f"{row.real:.3f}")
    return table


def _errors(explanation: Any, calibration: Any) -> Text:
    costs = ", ".join(f"{kind} {share:.0%}" for kind, share in explanation.mape.items() if math.isfinite(share))
    optimum = explanation.realised_of_optimum
    realised = f"{optimum:.0%}" if math.isfinite(optimum) else "unknown"
    return Text(
        f"cost model, mean absolute error: {costs}\n"
        f"acceptance, expected calibration error: {calibration.error:.3f}\n"
        f"selector's share of step time: {explanation.share_of_step:.2%}; realised of the tables' optimum: {realised}"
    )


def _milliseconds(predicted: float, real: float) -> str:
    return f"{1000 * predicted:.1f} → {1000 * real:.1f}"

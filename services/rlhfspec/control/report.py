"""What the operator is told, from what was heard: pure.

Example:
    >>> from rlhfspec.messages.records.metrics import example_step
    >>> facts = Facts(run="3f2a", total_steps=10, seconds_since_step=1.0, steps=(example_step(step=1),))
    >>> report = report_of(facts)
    >>> report.step, report.total_steps, report.reward, round(report.eta_seconds or 0.0, 1)
    (1, 10, 0.5, 33.2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlhfspec.cluster.report import GeneratorSays, Report, Trouble, WorkerSays
from rlhfspec.messages.records import Load
from rlhfspec.messages.records.metrics import StepMetrics
from rlhfspec.runs.view.roster import ProcessState
from rlhfspec.runs.view.text import one_line

RECENT_STEPS = 16  # that the time left is estimated from
MOST_TOLD = 1000  # workers
_MOST_CHARACTERS = 200  # of what a worker does
_Doing = Literal["working", "waiting", "silent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Hold what a report is made of. `steps`: the last ones, in order. `overdue`: workers past their deadline. `loads`:
    by number of generator."""

    run: str
    total_steps: int
    seconds_since_step: float
    steps: tuple[StepMetrics, ...] = ()
    checkpoint_step: int = 0
    workers: tuple[ProcessState, ...] = ()
    overdue: frozenset[tuple[str, int]] = frozenset()
    loads: Mapping[int, Load] = field(default_factory=dict)
    generators_wanted: int | None = None
    generators_wanted_because: str = ""
    troubles: tuple[Trouble, ...] = ()


def report_of(facts: Facts) -> Report:
    last = facts.steps[-1] if facts.steps else None
    step = last.step if last else 0
    seconds = [metrics.seconds.step for metrics in facts.steps[-RECENT_STEPS:]]
    there = [state for state in facts.workers if state.doing != "left"]
    return Report(
        run=facts.run,
        step=step,
        total_steps=facts.total_steps,
        checkpoint_step=facts.checkpoint_step,
        reward=last.reward.mean if last else None,
        kl=last.kl_k3 if last else None,
        tokens_per_second=_tokens_per_second(last, facts.loads),
        accepted_per_verification=last.accepted_per_verification if last else None,
        eta_seconds=eta_seconds(seconds, facts.total_steps - step, facts.seconds_since_step),
        seconds_since_step=max(facts.seconds_since_step, 0.0),
        generators_wanted=facts.generators_wanted,
        generators_wanted_because=facts.generators_wanted_because[:500],
        workers=tuple(_worker(state, facts.overdue) for state in there[:MOST_TOLD]),
        generators=tuple(_generator(facts.loads[worker]) for worker in sorted(facts.loads)[:MOST_TOLD]),
        troubles=facts.troubles[:16],
    )


def eta_seconds(seconds: Sequence[float], steps_left: int, since_step: float) -> float | None:
    """Return what is left, by the middle half of what recent steps took: one that waited for a machine says nothing of
    the next.

    >>> eta_seconds([2.0, 2.0, 300.0, 2.0], steps_left=3, since_step=1.0)
    5.0
    >>> eta_seconds([2.0], steps_left=1, since_step=60.0), eta_seconds([], steps_left=3, since_step=0.0)
    (0.0, None)
    """
    if not seconds:
        return None
    ordered = sorted(seconds)
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    mean = sum(middle) / len(middle)
    return max(0.0, max(steps_left, 0) * mean - min(since_step, mean))


def news(report: Report) -> tuple[object, ...]:
    """Return what is worth a report of its own; all else is told from time to time."""
    return (
        report.step,
        report.total_steps,
        report.checkpoint_step,
        report.generators_wanted,
        tuple((worker.stage, worker.worker, worker.doing == "silent", worker.overdue) for worker in report.workers),
        report.troubles,
    )


def _tokens_per_second(last: StepMetrics | None, loads: Mapping[int, Load]) -> float | None:
    """Return the speed of the last step, while it generated; before there is one, of the generators now."""
    if last is not None:
        return last.tokens_per_second
    running = [load.tokens_per_second for load in loads.values() if load.num_running]
    return sum(running) if running else None


def _worker(state: ProcessState, overdue: frozenset[tuple[str, int]]) -> WorkerSays:
    doing: _Doing = "working"  # one that starts, too
    if state.doing in ("waiting", "silent"):
        doing = "silent" if state.doing == "silent" else "waiting"
    return WorkerSays(
        stage=state.stage,
        worker=state.worker,
        doing=doing,
        what=one_line(state.what)[:_MOST_CHARACTERS],
        since_seconds=state.since_seconds,
        overdue=(state.stage, state.worker) in overdue,
    )


def _generator(load: Load) -> GeneratorSays:
    return GeneratorSays(
        worker=load.worker,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        tokens_per_second=load.tokens_per_second,
        strategy=one_line(load.strategy)[:_MOST_CHARACTERS],
    )

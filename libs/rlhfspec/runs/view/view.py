"""Display of a run: a live panel in a terminal, else one plain line per step.

Text from a model is escaped, so that it cannot control the terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, Self

from rich.console import Console
from rich.live import Live

from rlhfspec.errors import InvalidRequest
from rlhfspec.job import RLHFJob
from rlhfspec.messages.records.evaluations import Evaluation, best
from rlhfspec.messages.records.metrics import StepMetrics
from rlhfspec.runs.view.learning_signs import collapse_of, warning_of
from rlhfspec.runs.view.panel import panel
from rlhfspec.runs.view.progress import RunProgress
from rlhfspec.runs.view.text import duration, estimates, number, visible

REFRESHES_PER_SECOND = 2  # costs about 2 ms of one core each


class View:
    """Display of a run's `progress`, drawn by a thread; methods return at once."""

    def __init__(
        self,
        job: RLHFJob,
        console: Console,
        *,
        on_interrupt: str = "stop with a checkpoint",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.progress = RunProgress(job, now)
        self.mode = _mode(job.spec.observability.view, console)
        self._console, self._on_interrupt = console, on_interrupt
        self._live: Live | None = None

    def step(self, metrics: StepMetrics) -> None:
        self.progress.step(metrics)
        if self.mode == "plain":
            self.say(step_line(metrics, self.progress))

    def evaluation(self, evaluation: Evaluation) -> None:
        self.progress.evaluation(evaluation)
        if self.mode == "plain":
            self.say(evaluation_line(evaluation, self.progress))

    def say(self, text: str) -> None:
        if self.mode != "off":
            print_line(self._console, text)

    def __enter__(self) -> Self:
        if self.mode == "plain":
            self.say(job_line(self.progress.job))
        elif self.mode == "live":
            self._live = Live(
                get_renderable=lambda: panel(self.progress, self._console.size, self._on_interrupt),
                console=self._console,
                refresh_per_second=REFRESHES_PER_SECOND,
            )
            self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def step_line(metrics: StepMetrics, progress: RunProgress) -> str:
    width = len(str(progress.num_steps))
    eta, accepted = progress.eta_seconds, metrics.accepted_per_verification
    parts = [
        f"step {metrics.step:{width}d}/{progress.num_steps}",
        f"reward {number(metrics.reward.mean):<6}",
        f"KL {estimates(metrics.kl):<11}" if metrics.kl is not None else "",
        f"length {number(metrics.response_length.mean):<5}",
        f"{number(metrics.tokens_per_second):>6} tok/s" if metrics.tokens_per_second is not None else "",
        f"accepted {number(accepted):<4}" if accepted is not None else "",
        f"dropped {metrics.num_dropped}" if metrics.num_dropped else "",
        f"{duration(metrics.seconds.step):>5}",
        f"ETA {duration(eta):<5}" if eta else "",
        f"generator/trainer log-prob difference max {number(metrics.log_prob_difference.max)}",
        warning_of(progress.steps),
    ]
    return "  ".join(part for part in parts if part)


def evaluation_line(evaluation: Evaluation, progress: RunProgress) -> str:
    parts = [
        f"evaluation after step {evaluation.step}: reward {number(evaluation.reward.mean)}",
        f"(best {number(best(progress.evaluations).reward.mean)} after step {best(progress.evaluations).step})",
        f"length {number(evaluation.response_length.mean)}",
        f"{evaluation.num_samples} held-out samples"
        + (f", {evaluation.num_failed} failed" * bool(evaluation.num_failed)),
        duration(evaluation.seconds),
        collapse_of(progress.evaluations),
    ]
    return "  ".join(part for part in parts if part)


def job_line(job: RLHFJob) -> str:
    training, algorithm = job.spec.training, job.spec.algorithm
    size = f"{training.prompts_per_step} prompts x {algorithm.samples_per_prompt} samples"
    return f"{job.metadata.name}: {algorithm.name}, {training.steps} steps of {size}"


def print_line(console: Console, text: str) -> None:
    """Print the text without markup or folding, replacing unencodable characters."""
    safe = visible(text).encode(console.encoding, "replace").decode(console.encoding)
    console.print(safe, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _mode(wanted: Literal["auto", "live", "plain", "off"], console: Console) -> Literal["live", "plain", "off"]:
    """Return the display mode; the live panel needs cursor movement and UTF-8."""
    able = console.is_terminal and not console.is_dumb_terminal and console.encoding.lower().startswith("utf")
    if wanted == "live" and not able:
        problem = "needs a terminal that moves its cursor and shows UTF-8; take auto or plain"
        raise InvalidRequest("spec.observability.view", wanted, problem)
    if wanted != "auto":
        return wanted
    return "live" if able else "plain"

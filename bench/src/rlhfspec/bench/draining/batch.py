"""Record of a draining batch, step by step.

Sequences of lognormal length start together; the batch shrinks as they finish, and the best strategy changes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlhfspec.bench.generating.ours import accepted_per_verification, digest
from rlhfspec.engine import Completion, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainingStep:
    seconds: float  # since the start of the run, at the end of the step
    num_active: int
    num_tokens: int  # committed by this step
    num_verified_nodes: int
    strategy: str


@dataclass(slots=True, kw_only=True)
class Trace:
    """Record of one run over the batch. `completions` is filled at the end."""

    mode: str
    steps: list[DrainingStep] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.steps[-1].seconds if self.steps else 0.0

    @property
    def num_tokens(self) -> int:
        return sum(step.num_tokens for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def recent_tokens_per_second(self) -> float:
        """Return tokens per second over the last 12 steps."""
        recent = self.steps[-12:]
        began = self.steps[-13].seconds if len(self.steps) > 12 else 0.0
        elapsed = self.seconds - began
        return sum(step.num_tokens for step in recent) / elapsed if elapsed else 0.0

    @property
    def accepted_per_verification(self) -> float:
        return accepted_per_verification(self.completions)

    @property
    def digest(self) -> str:
        return digest(self.completions)

    def strategies_by_activity(self) -> list[tuple[int, int, str]]:
        """Return (upper limit, lower limit, most used strategy) by band of active sequences; limits halve each time."""
        bands: list[tuple[int, int, str]] = []
        high = max((step.num_active for step in self.steps), default=0)
        while high >= 1:
            low = high // 2 + 1
            names = [step.strategy for step in self.steps if low <= step.num_active <= high]
            if names:
                bands.append((high, low, max(dict.fromkeys(names), key=names.count)))
            high //= 2
        return bands


def drain_and_watch(engine: Any, requests: list[Request], mode: str, on_step: Callable[[Trace], None]) -> Trace:
    """Run the requests with an empty prefix cache, calling `on_step` after each step; its time does not count."""
    engine.forget_kept()
    trace = Trace(mode=mode)
    for request in requests:
        engine.submit(request)
    finished: dict[str, Completion] = {}
    seconds = 0.0
    while len(finished) < len(requests):
        report = engine.step()
        seconds += report.seconds
        finished.update({completion.id: completion for completion in report.finished})
        trace.steps.append(
            DrainingStep(
                seconds=seconds,
                num_active=report.num_decoding,
                num_tokens=report.num_committed,
                num_verified_nodes=report.num_verified_nodes,
                strategy=report.strategy,
            )
        )
        on_step(trace)
    trace.completions = [finished[request.id] for request in requests]
    return trace

"""What a selector did and why, as plain dataclasses that a command line prints."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfspec.drafting.watchdog import WatchdogEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One step: what was expected of it and what came."""

    step: int
    plan: str
    is_probe: bool  # tried to learn, not because it looked best
    runner_up: str
    num_sequences: int
    num_prefill_rows: int
    num_proposed: int  # nodes drafted
    num_verified: int  # nodes kept by the budget: N
    predicted_accepted: float
    accepted: int
    predicted_draft_seconds: float
    draft_seconds: float
    predicted_verify_seconds: float
    verify_seconds: float
    predicted_seconds: float
    seconds: float
    selector_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return (self.num_sequences + self.accepted) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A plan as it looks at the current batch."""

    plan: str
    tokens_per_second: float
    num_tokens: float  # expected of one step, over the batch
    num_verified: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The state of a selector. `share_of_step`: its own time over the time of all steps."""

    decisions: tuple[Decision, ...]  # the last ones, oldest first
    options: tuple[Option, ...]  # best first; empty for a fixed selector
    mape: dict[str, float]  # by kind of cost, and "step"
    share_of_step: float
    realised_of_optimum: float  # tokens/s against what the measured tables and acceptance allow; nan when unknown
    events: tuple[WatchdogEvent, ...]

"""Results of `rlhfspec bench serve`.

Example: of two chats in four seconds, the second waited too long for its first token.
    >>> answers = [TimedAnswer(ttft=ttft, tpot=0.05, gap=0.1, num_tokens=9, digest="") for ttft in (0.2, 1.5)]
    >>> turn = ServeTurn(seconds=4.0, answers=tuple(answers), num_rollout_tokens=400)
    >>> row = ServeRow.of("priority", {"priority": [turn]}, ttft=1.0, tpot=0.1)
    >>> row.goodput, row.ttft[0], row.rollout_speed
    (0.25, 0.85, 100.0)
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhfspec.bench.generating.results import Bar, BenchResults
from rlhfspec.bench.ratios import Ratio, paired

OURS, VLLM = "ours", "vllm"
LEAST_KEPT, TIMES_TPOT = 0.6, 1.3  # of the rollouts' speed alone; of the target of time per output token


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeMode:
    system: str = OURS
    chats: bool = False
    rollouts: bool = False
    equal: bool = False  # chats have no priority
    alone: str = ""  # the mode with the same rollouts and no chats


SERVE_MODES = {
    "alone": ServeMode(chats=True),
    "rollouts": ServeMode(rollouts=True),
    "priority": ServeMode(chats=True, rollouts=True, alone="rollouts"),
    "equal": ServeMode(chats=True, rollouts=True, equal=True, alone="rollouts"),
    "vllm-alone": ServeMode(system=VLLM, chats=True),
    "vllm-rollouts": ServeMode(system=VLLM, rollouts=True),
    "vllm-priority": ServeMode(system=VLLM, chats=True, rollouts=True, alone="vllm-rollouts"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """Answer as its client saw it, in seconds."""

    ttft: float  # from the chat's arrival to the first token
    tpot: float  # mean time per token after the first
    gap: float  # the longest between two chunks
    num_tokens: int
    digest: str  # of the tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeTurn:
    """Measurements of a mode in one repetition."""

    seconds: float  # until the last answer
    answers: tuple[TimedAnswer, ...] = ()
    num_rollout_tokens: int = 0
    step_seconds: float = 0.0  # median of our engine's steps

    @property
    def rollout_speed(self) -> float:
        return self.num_rollout_tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRow:
    """Measurements of a mode in all repetitions: percentiles 50 and 95 in seconds, and tokens or chats a second."""

    mode: str
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    gap: tuple[float, ...]
    chat_speed: float
    rollout_speed: float
    kept: Ratio | None  # the rollouts' speed over that without chats
    goodput: float  # chats whose first token and time per token met the targets
    turns: tuple[ServeTurn, ...]

    @classmethod
    def of(cls, mode: str, turns: Mapping[str, Sequence[ServeTurn]], *, ttft: float, tpot: float) -> ServeRow:
        """Return a mode's row. `turns`: those of all modes. `ttft`, `tpot`: targets."""
        own, alone = turns[mode], turns.get(SERVE_MODES[mode].alone)
        answers = [answer for turn in own for answer in turn.answers]
        seconds = sum(turn.seconds for turn in own)

        def percentiles(name: str) -> tuple[float, ...]:
            values = [getattr(answer, name) for answer in answers]
            return tuple(map(float, np.percentile(values, (50, 95)))) if values else ()

        return cls(
            mode=mode,
            ttft=percentiles("ttft"),
            tpot=percentiles("tpot"),
            gap=percentiles("gap"),
            chat_speed=sum(answer.num_tokens for answer in answers) / seconds,
            rollout_speed=sum(turn.num_rollout_tokens for turn in own) / seconds,
            kept=paired(*([max(turn.rollout_speed, 1e-3) for turn in each] for each in (own, alone)))
            if alone
            else None,
            goodput=sum(answer.ttft <= ttft and answer.tpot <= tpot for answer in answers) / seconds,
            turns=tuple(own),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeResults(BenchResults):
    rows: tuple[ServeRow, ...]
    idle_ttft: dict[str, float]  # seconds of a system that has nothing else to do


def bars_of_serve(results: ServeResults) -> Iterator[Bar]:
    """Yield the bars on chats with priority beside rollouts."""
    rows = {row.mode: row for row in results.rows}
    if "priority" not in rows:
        return
    row = rows["priority"]
    most = {"p95 TPOT": (row.tpot[1], TIMES_TPOT * results.settings["tpot"])}
    if "rollouts" in rows:
        step = statistics.median(turn.step_seconds for turn in rows["rollouts"].turns)
        most["median TTFT"] = row.ttft[0], step + results.idle_ttft[OURS]
    common: dict[str, Any] = {"num_threads": results.settings["num_threads"], "scenario": "priority"}
    for name, (found, wanted) in most.items():
        yield Bar(name=name, wanted=f"<= {_ms(wanted)}", found=_ms(found), holds=found <= wanted, **common)
    if row.kept:
        wanted, holds = f">= {LEAST_KEPT:.0%}", row.kept.value >= LEAST_KEPT
        yield Bar(name="rollouts / rollouts alone", wanted=wanted, found=str(row.kept), holds=holds, **common)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"

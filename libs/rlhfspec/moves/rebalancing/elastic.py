"""Choice of the number of generators; the caller passes the time.

A stage with n engines takes `F(n) = t0 * max(longest, tokens / (n * rows)) + (c * tokens + prefill) / n`, where a step
of B sequences takes t0 + c * B. One more is worthwhile if F falls by at least 15 %, one fewer if F grows by less than
5 %; the gap prevents oscillation. More needs two consecutive stages or a long one, fewer needs three. Whenever fewer
were too few, that number of stages doubles.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MORE_SHARE = 0.15  # of F that one more must save
FEWER_SHARE = 0.05  # of F that one less may cost
STAGES_FOR_MORE, STAGES_FOR_FEWER = 2, 3
MOST_STAGES = 1 << 10  # limit of the stages that fewer may need
COOLDOWN_SECONDS = 30.0  # between two changes
LONG_STAGE_SECONDS = 30.0
_SCALE_UP_SECONDS = 30.0  # until a new generator helps; within a long stage, adding some must save more than this


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutlook:
    step_seconds: float  # of the median engine
    sequence_seconds: float
    tokens: float  # expected in all: running, waiting and still to be pulled
    longest: float  # expected tokens of the longest sequence
    rows: int  # sequences that a generator runs at once
    prefill_seconds: float = 0.0  # of prompts not yet prefilled

    @property
    def is_known(self) -> bool:
        return self.tokens > 0 and self.step_seconds + self.sequence_seconds > 0

    def seconds(self, num_generators: int) -> float:
        steps = max(self.longest, self.tokens / (num_generators * max(self.rows, 1)))
        shared = self.sequence_seconds * self.tokens + self.prefill_seconds
        return self.step_seconds * steps + shared / num_generators


def worth(outlook: StageOutlook, wanted: int, *, least: int, most: int) -> int:
    number = min(max(wanted, least), most)
    while number < most and outlook.seconds(number + 1) <= (1 - MORE_SHARE) * outlook.seconds(number):
        number += 1
    if number == wanted > least and outlook.seconds(number - 1) < (1 + FEWER_SHARE) * outlook.seconds(number):
        return number - 1
    return number


@dataclass(frozen=True, slots=True)
class Wanted:
    number: int
    because: str


class Elastic:
    """Controller of the number of generators, between `least` and `most`."""

    def __init__(self, *, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._wanted = Wanted(least, "")
        self._is_known = False
        self._began_looking_at: float | None = None
        self._num_stages = 0
        self._stage = -1
        self._greatest: StageOutlook | None = None
        self._is_whole = False  # the stage was seen from its beginning
        self._began_at = 0.0
        self._stages: deque[StageOutlook] = deque(maxlen=MOST_STAGES)  # since the last change
        self._changed_at = -COOLDOWN_SECONDS
        self._patience = STAGES_FOR_FEWER
        self._was_lowered = False

    def learn(self, stage: int, outlook: StageOutlook, now: float, *, num_generators: int) -> Wanted | None:
        """Learn a stage's outlook; return the wanted number of generators, or None while unknown."""
        self._begin(now, num_generators)
        if stage > self._stage:
            self._end_stage(now)
            self._is_whole = self._stage >= 0
            self._stage, self._greatest, self._began_at = stage, None, now
        if stage == self._stage and outlook.is_known:
            number = self._wanted.number
            if self._greatest is None or outlook.seconds(number) > self._greatest.seconds(number):
                self._greatest = outlook
            self._look_at_a_long_stage(outlook, now)
        return self._wanted if self._is_known else None

    def _begin(self, now: float, num_generators: int) -> None:
        if self._began_looking_at is None:
            self._began_looking_at = now
        self._is_known |= self._num_stages >= STAGES_FOR_FEWER and now - self._began_looking_at >= COOLDOWN_SECONDS
        if not self._is_known:
            self._wanted = Wanted(min(max(num_generators, self._least), self._most), "the current number is enough")

    def _end_stage(self, now: float) -> None:
        if self._greatest is not None and self._is_whole:
            self._num_stages += 1
            self._stages.append(self._greatest)
            self._decide(now)

    def _decide(self, now: float) -> None:
        if now - self._changed_at < COOLDOWN_SECONDS:
            return
        number, seen = self._wanted.number, list(self._stages)
        if len(seen) >= STAGES_FOR_MORE:
            more = min(self._worth(outlook) for outlook in seen[-STAGES_FOR_MORE:])
            if more > number:
                return self._change(more, seen[-1], now)
        if self._is_known and len(seen) >= self._patience:
            fewer = max(self._worth(outlook) for outlook in seen[-self._patience :])
            if fewer < number:
                self._change(fewer, seen[-1], now)

    def _look_at_a_long_stage(self, outlook: StageOutlook, now: float) -> None:
        if now - self._began_at < LONG_STAGE_SECONDS or now - self._changed_at < COOLDOWN_SECONDS:
            return
        number, more = self._wanted.number, self._worth(outlook)
        if more > number and outlook.seconds(number) - outlook.seconds(more) > _SCALE_UP_SECONDS:
            self._change(more, outlook, now)

    def _worth(self, outlook: StageOutlook) -> int:
        return worth(outlook, self._wanted.number, least=self._least, most=self._most)

    def _change(self, number: int, outlook: StageOutlook, now: float) -> None:
        before = self._wanted.number
        if number > before and self._was_lowered:
            self._patience = min(2 * self._patience, MOST_STAGES)
        self._was_lowered = number < before
        self._changed_at, self._is_known = now, True
        self._stages.clear()
        ends = f"a stage takes {outlook.seconds(before):.1f} s with {before} and {outlook.seconds(number):.1f} s with"
        self._wanted = Wanted(number, f"{ends} {number}")

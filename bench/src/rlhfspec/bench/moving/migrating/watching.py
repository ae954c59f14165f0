"""Observation of one sequence on two generators: when its tokens arrived, and the costs of moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

from rlhfspec.bench.moving.migrating.results import Moment
from rlhfspec.bench.moving.pair import NUM_GENERATORS, Pair
from rlhfspec.bench.worker import WorkerFailed
from rlhfspec.messages.records import Move, Moved

_LOOK_SECONDS = 0.01  # between two looks
_PATIENCE_SECONDS = 60.0
_IDLE_SECONDS = 0.05  # longest measurement of idle CPU


class Seen(NamedTuple):
    at: float  # end of a step
    num_tokens: int


class _Cpu(NamedTuple):
    calls: float
    others: float
    longest_held: float


class Watch:
    def __init__(self, pair: Pair, name: str) -> None:
        self._pair = pair
        self._name = name
        self._seen: list[list[Seen]] = [[] for _ in range(NUM_GENERATORS)]
        self._step = [0.0] * NUM_GENERATORS
        self._has_ended = False

    def wait_for_tokens(self, number: int, count: int) -> bool:
        """Wait until `count` more steps on generator `number` gave tokens; return False if the sequence ended first."""
        self._look(number)
        self._seen[number].clear()
        return self._wait(number, lambda: len({seen.num_tokens for seen in self._seen[number]}) > count)

    def move(self, move: Move) -> tuple[Moment | None, str]:
        """Move the sequence; return its measurements and an empty text, or None and the reason why it failed."""
        source, destination = move.source, move.destination
        for number in range(NUM_GENERATORS):
            self._look(number)
        self._seen[source], self._seen[destination] = self._seen[source][-1:], []
        before = self._cpu()
        began = time.monotonic()
        told = self._pair.ask(source, "move", "moved", **asdict(move))
        ended = told.pop("at")
        after = self._cpu()
        moved = Moved(**told)
        if moved.how != "kv" or not self._wait(destination, lambda: bool(self._seen[destination])):
            return None, moved.reason or moved.how
        self._look(source)
        first = self._seen[destination][0]
        last = max(seen for seen in self._seen[source] if seen.at < first.at)
        seconds = ended - began
        in_engines = after.calls - before.calls
        cpu = max(in_engines + after.others - before.others - self._idle_cpu(min(seconds, _IDLE_SECONDS)), 0.0)
        return Moment(
            pause=moved.pause_seconds, gap=first.at - last.at, seconds=seconds, num_bytes=moved.num_bytes, cpu=cpu,
            engine_cpu=in_engines,
            held=after.longest_held, step=self._step[destination],
        ), ""  # fmt: skip

    def prefill_gap(self, number: int) -> float | None:
        """Preempt the sequence; return the seconds without tokens while its KV is recomputed, or None if it ended."""
        self._look(number)
        self._seen[number] = self._seen[number][-1:]
        at = self._pair.ask(number, "preempt", "preempted", id=self._name)["at"]
        self._look(number)
        before = max(seen for seen in self._seen[number] if seen.at <= at)

        def after() -> list[Seen]:
            return [seen for seen in self._seen[number] if seen.num_tokens > before.num_tokens]

        return after()[0].at - before.at if self._wait(number, lambda: bool(after())) else None

    def _wait(self, number: int, is_so: Callable[[], bool]) -> bool:
        """Poll generator `number` until `is_so` holds; return False if the sequence ended first."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            self._look(number)
            if is_so() or self._has_ended:
                return is_so()
            time.sleep(_LOOK_SECONDS)
        raise WorkerFailed(f"{self._name} has had no token for {_PATIENCE_SECONDS:g} s")

    def _look(self, number: int) -> None:
        answer = self._pair.ask(number, "watched", "watched")
        self._seen[number] += [Seen(at, tokens) for name, at, tokens in answer["steps"] if name == self._name]
        self._step[number] = answer["step_seconds"]
        self._has_ended |= answer["has_ended"]

    def _idle_cpu(self, seconds: float) -> float:
        """Return the CPU seconds that both generators use in `seconds` without moves."""
        before = self._cpu()
        time.sleep(seconds)
        after = self._cpu()
        return after.calls + after.others - before.calls - before.others

    def _cpu(self) -> _Cpu:
        """Return both generators' CPU seconds in engine calls and other threads, and the longest delay by calls."""
        told = [self._pair.ask(number, "cpu", "cpu") for number in range(NUM_GENERATORS)]
        calls, others = (sum(one[name] for one in told) for name in ("calls", "others"))
        return _Cpu(calls, others, max(one["longest_held"] for one in told))

"""Deadlines, retries and concurrency of reward calls."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from rlhfspec.messages.records import Sample
from rlhfspec.training.scoring.rewards.base import CallFailed, Reward, Rewarder

FIRST_DELAY_SECONDS = 0.5
MAX_DELAY_SECONDS = 30.0
# An endpoint that asks for a longer pause counts as down.
MAX_RETRY_AFTER_SECONDS = 60.0
Sleep = Callable[[float], Awaitable[None]]
Told = Callable[[str, str], None]  # a source's name, and the error of its last call or ""
During = Callable[[str], AbstractContextManager[object]]  # entered around each call, with a description of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    concurrency: int
    timeout_seconds: float
    retries: int


class Attempts:
    """Reward source with retries, a deadline and limited concurrency."""

    def __init__(self, name: str, source: Rewarder, limits: Limits, sleep: Sleep) -> None:
        self.name = name
        self.source = source
        self._limits = limits
        self._sleep = sleep
        self._slots = asyncio.Semaphore(limits.concurrency)

    async def rewards(self, samples: Sequence[Sample], during: During, told: Told) -> list[Reward] | CallFailed:
        attempt = 1
        while True:
            result = await self._call(samples, during)
            if not isinstance(result, CallFailed):
                told(self.name, "")
                return result
            told(self.name, result.problem)
            too_long = result.wait_seconds > MAX_RETRY_AFTER_SECONDS
            if not result.temporary or attempt > self._limits.retries or too_long:
                return _given_up(result, attempt)
            await self._sleep(max(delay_seconds(self.name, samples[0].id, attempt), result.wait_seconds))
            attempt += 1

    async def _call(self, samples: Sequence[Sample], during: During) -> list[Reward] | CallFailed:
        """Make one call in a concurrency slot, which is released between attempts."""
        timeout_seconds = self._limits.timeout_seconds
        async with self._slots:
            try:
                async with asyncio.timeout(timeout_seconds):
                    what = f"scoring {samples[0].id} with source {self.name}"
                    return await self.source.rewards(samples, lambda: during(what))
            except TimeoutError:
                return CallFailed(f"it gave no answer within {timeout_seconds:g} s", temporary=True)
            except CallFailed as failure:
                return failure


def delay_seconds(source: str, sample_id: str, attempt: int) -> float:
    """Return an exponential retry delay, jittered by sample."""
    drawn = hashlib.blake2b(f"{source}:{sample_id}:{attempt}".encode(), digest_size=8).digest()
    spread = int.from_bytes(drawn, "little") / 2**64  # in [0, 1)
    return min(MAX_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** (attempt - 1) * (1 + spread / 2))


def _given_up(failure: CallFailed, num_calls: int) -> CallFailed:
    problem = failure.problem + ("" if num_calls == 1 else f" ({num_calls} calls)")
    if failure.wait_seconds > MAX_RETRY_AFTER_SECONDS:
        problem += f"; it asks to wait {failure.wait_seconds:g} s, more than {MAX_RETRY_AFTER_SECONDS:g} s"
    return CallFailed(problem, temporary=False, cause=failure.__cause__)

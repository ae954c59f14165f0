"""The longest waiting job is reconciled next, none twice at a time, without busy loops."""

import asyncio
import heapq
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rlhfspec.operator.looking import queue as queues
from rlhfspec.operator.looking.queue import GATHER_SECONDS, PATIENT_SECONDS, Key, ReconcileResult, WorkQueue

Look = Callable[[Key], Awaitable[ReconcileResult]]


class FakeTimers:
    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Any:
        heapq.heappush(self._calls, (when, len(self._calls), callback))

    async def advance(self, seconds: float) -> None:
        end = self.now + seconds
        await settle()
        while self._calls and self._calls[0][0] <= end:
            self.now, _, callback = heapq.heappop(self._calls)
            callback()
            await settle()
        self.now = end
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Looking:
    def __init__(self, answers: Callable[[Key], ReconcileResult] = lambda key: ReconcileResult()) -> None:
        self.seen: list[Key] = []
        self.under_way: Counter[Key] = Counter()
        self.open = asyncio.Event()
        self.open.set()
        self._answers = answers

    async def __call__(self, key: Key) -> ReconcileResult:
        self.seen.append(key)
        self.under_way[key] += 1
        assert self.under_way[key] == 1, f"two looks at {key} at a time"
        await self.open.wait()
        self.under_way[key] -= 1
        return self._answers(key)


@asynccontextmanager
async def working(look: Look, workers: int = 2, waited: Callable[[float], None] = lambda seconds: None) -> Any:
    timers = FakeTimers()
    queue = WorkQueue(look, timers, waited=waited)
    tasks = [asyncio.create_task(queue.work()) for _ in range(workers)]
    try:
        yield queue, timers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


A, B, C = ("team", "a"), ("team", "b"), ("team", "c")


async def test_simultaneous_events_cause_one_reconcile() -> None:
    look = Looking()
    async with working(look) as (queue, timers):
        for _ in range(50):
            queue.tell(A)
        await timers.advance(10.0)
    assert look.seen == [A]


async def test_an_event_during_a_reconcile_causes_another_one() -> None:
    look = Looking()
    look.open.clear()
    async with working(look) as (queue, timers):
        queue.tell(A)
        await timers.advance(1.0)
        for _ in range(3):
            queue.tell(A)
        await timers.advance(1.0)
        before = list(look.seen)
        look.open.set()
        await timers.advance(1.0)
    assert (before, look.seen) == ([A], [A, A])


async def test_events_in_quick_succession_share_reconciles() -> None:
    look = Looking()
    async with working(look) as (queue, timers):
        for _ in range(20):
            queue.tell(A)
            await timers.advance(0.1)
        await timers.advance(1.0)
    assert len(look.seen) == pytest.approx(2.0 / queues.REST_SECONDS + 1, abs=1)


async def test_the_queue_reports_how_late_each_reconcile_was() -> None:
    look, waited = Looking(), list[float]()
    look.open.clear()
    async with working(look, workers=1, waited=waited.append) as (queue, timers):
        queue.tell(A)
        queue.tell(B)
        await timers.advance(GATHER_SECONDS + 3.0)
        look.open.set()
        await timers.advance(1.0)
    assert waited == pytest.approx([0.0, 3.0])


async def test_a_busy_job_does_not_keep_the_others_waiting() -> None:
    look = Looking()
    look.open.clear()
    async with working(look, workers=1) as (queue, timers):
        queue.tell(A)
        await timers.advance(GATHER_SECONDS)
        for key in (A, B, A, C, A):
            queue.tell(key)
        await timers.advance(1.0)
        look.open.set()
        await timers.advance(1.0)
    assert look.seen == [A, B, C, A]


async def test_many_jobs_of_one_namespace_do_not_delay_other_namespaces() -> None:
    crowd = [("crowd", str(number)) for number in range(100)]
    look = Looking()
    look.open.clear()
    async with working(look, workers=1) as (queue, timers):
        for key in (*crowd, A, B):
            queue.tell(key)
        await timers.advance(GATHER_SECONDS)
        look.open.set()
        while len(look.seen) < len(crowd) + 2:
            await asyncio.sleep(0)
    assert look.seen.index(A) < look.seen.index(B) < 6
    assert [key for key in look.seen if key in crowd] == crowd


async def test_a_hanging_reconcile_delays_no_other_job() -> None:
    look = Looking()
    hangs = asyncio.Event()

    async def looking(key: Key) -> ReconcileResult:
        looked = await look(key)
        if key == A:
            await hangs.wait()
        return looked

    async with working(looking, workers=1) as (queue, timers):
        for key in (A, B, C, A):
            queue.tell(key)
            await timers.advance(GATHER_SECONDS)
        await asyncio.sleep(2 * PATIENT_SECONDS)
        await timers.advance(1.0)
    assert look.seen == [A, B, C]


@pytest.mark.parametrize(
    "answer", [ReconcileResult(0.0, did="the same"), ReconcileResult(failed=True), ReconcileResult(0.0, failed=True)]
)
async def test_a_reconcile_that_repeats_itself_backs_off(answer: ReconcileResult) -> None:
    at: list[float] = []

    async def look(key: Key) -> ReconcileResult:
        at.append(timers.now)
        queue.tell(key)  # as a watch does that tells what the look itself wrote
        return answer

    async with working(look) as (queue, timers):
        queue.tell(A)
        await timers.advance(600.0)
    assert len(at) < 20
    assert at[-1] - at[-2] == pytest.approx(queues.LONGEST_BACKOFF_SECONDS, rel=0.1)


async def test_a_reconcile_with_new_results_is_not_delayed() -> None:
    look = Looking(lambda key: ReconcileResult(0.1, did=len(look.seen)))
    async with working(look) as (queue, timers):
        queue.tell(A)
        await timers.advance(10.0)
    assert len(look.seen) == pytest.approx(100, abs=3)


async def test_a_failing_reconcile_stops_no_other_job(caplog: pytest.LogCaptureFixture) -> None:
    look = Looking(lambda key: ReconcileResult() if key != A else ReconcileResult(requeue_seconds=1 / 0))
    async with working(look, workers=1) as (queue, timers):
        for key in (A, B, C):
            queue.tell(key)
        await timers.advance(1.0)
    assert set(look.seen) == {A, B, C}
    assert "reconciling team/a failed" in caplog.text


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.floats(0, 3), st.booleans()), max_size=40), st.integers(1, 3))
def test_every_event_is_followed_by_a_reconcile(told: list[tuple[Key, float, bool]], workers: int) -> None:
    async def check() -> None:
        look = Looking()
        async with working(look, workers) as (queue, timers):
            for key, wait, is_open in told:
                queue.tell(key)
                await timers.advance(wait)
                look.open.set() if is_open else look.open.clear()
            look.open.set()
            await timers.advance(1.0)
            before = len(look.seen)
            for key in (A, B, C):
                queue.tell(key)
            await timers.advance(1.0)
            assert sorted(look.seen[before:]) == [A, B, C]
            assert {key for key, _, _ in told} <= set(look.seen[:before])

    asyncio.run(check())

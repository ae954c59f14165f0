"""Calls into an engine's thread are metered, ordered, made once and never lost."""

import asyncio
import threading
import time

import pytest

from rlhfspec.errors import LinkError
from rlhfspec.moves.migration.engine_calls import EngineCalls, EngineStopped


async def test_run_makes_at_least_one_call_and_stops_after_its_budget() -> None:
    calls = EngineCalls()
    made: list[int] = []
    waiting = [calls.call(lambda index=index: (made.append(index), time.sleep(0.002))) for index in range(3)]
    calls.run(budget_seconds=0.001)
    assert (made, calls.waiting) == ([0], 2)
    calls.run(budget_seconds=60.0)
    assert (made, calls.waiting) == ([0, 1, 2], 0)
    calls.run()
    await asyncio.gather(*waiting)
    assert calls.longest_seconds >= 0.002


async def test_an_expected_error_reaches_the_caller_and_a_bug_ends_the_thread_too() -> None:
    def refuse() -> None:
        raise LinkError("x", "cut")

    woken: list[int] = []
    calls = EngineCalls(on_call=lambda: woken.append(1))
    refused, bug, after = calls.call(refuse), calls.call(lambda: 1 // 0), calls.call(lambda: 3)
    assert len(woken) == 3
    calls.run(budget_seconds=0.0)
    with pytest.raises(LinkError):
        await refused
    with pytest.raises(ZeroDivisionError):
        calls.run(budget_seconds=0.0)
    with pytest.raises(EngineStopped):
        await bug
    thread = threading.Thread(target=calls.run)
    thread.start()
    assert await after == 3
    thread.join()


async def test_closing_engine_calls_fails_all_waiting_callers() -> None:
    calls = EngineCalls()
    waiting, cancelled = calls.call(lambda: 1), calls.call(lambda: 2)
    cancelled.cancel()
    calls.close()
    with pytest.raises(EngineStopped):
        await waiting
    with pytest.raises(EngineStopped):
        calls.call(lambda: 3)

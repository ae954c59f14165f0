"""Idle heartbeats are rare, and news is sent at once."""

import asyncio
import threading
import time

import pytest

from rlhfspec.stage.pace import Beats, Pace
from rlhfspec.stage.vitals import Vitals


def slow(vitals: Vitals, monkeypatch: pytest.MonkeyPatch) -> Beats:
    beats = Beats(vitals)
    monkeypatch.setattr(beats, "_pace", Pace(1000.0, 1000.0))
    return beats


async def test_work_that_begins_in_any_thread_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    vitals = Vitals()
    worker = vitals.worker("reward", 0)
    begun, over = threading.Event(), threading.Event()

    def work() -> None:
        begun.wait()
        with worker.working("scoring", deadline_seconds=60.0):
            over.wait()

    thread = threading.Thread(target=work)
    thread.start()
    beat = asyncio.create_task(slow(vitals, monkeypatch).next("waits", asyncio.Event()))
    try:
        await asyncio.sleep(0.05)
        assert not beat.done()
        begun.set()
        await asyncio.wait_for(beat, 60.0)
    finally:
        begun.set()
        over.set()
        thread.join()


async def test_a_trouble_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    vitals = Vitals()
    worker = vitals.worker("trainer", 0)
    beat = asyncio.create_task(slow(vitals, monkeypatch).next("waits", asyncio.Event()))
    await asyncio.sleep(0.05)
    worker.in_trouble("no weights are stored: disk full")
    await asyncio.wait_for(beat, 60.0)


async def test_a_stop_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    stopping = asyncio.Event()
    beat = asyncio.create_task(slow(Vitals(), monkeypatch).next("waits", stopping))
    await asyncio.sleep(0.05)
    stopping.set()
    await asyncio.wait_for(beat, 60.0)


def test_work_that_goes_on_is_no_news() -> None:
    vitals = Vitals()
    with vitals.worker("reward", 0).working("scoring", deadline_seconds=60.0):
        before = vitals.snapshot()[0]
        time.sleep(0.01)
        after = vitals.snapshot()[0]
    assert after.busy_seconds > before.busy_seconds
    assert after.without_times() == before.without_times()

"""Vitals, threads, heartbeats and supervisor, driven by events and a fake clock."""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError as FutureCancelled
from contextlib import nullcontext
from dataclasses import replace

import pytest
from dashboards import beat, load, snapshot
from small_job import a_job
from views import printed

from rlhfspec.cli.commands.top import _row
from rlhfspec.control.show import document_of
from rlhfspec.dashboard.live.live_state import Live
from rlhfspec.errors import InvalidRequest, LoopStalled, RecordUndeliverable, StageFailed, StageStalled
from rlhfspec.messages.transport.clock import FakeClock
from rlhfspec.plugin.status import table_of
from rlhfspec.runs.live.live import LiveView
from rlhfspec.runs.live.run_state import SILENT_SECONDS, KnownRun
from rlhfspec.runs.view.roster import process_states
from rlhfspec.stage.base import Service
from rlhfspec.stage.context import kept_versions
from rlhfspec.stage.pace import Beats, Pace
from rlhfspec.stage.supervisor import Supervisor
from rlhfspec.stage.threads import ComputeThread
from rlhfspec.stage.vitals import SAID_NOTHING, Vitals


async def test_vitals_report_the_current_work_and_its_start() -> None:
    vitals = Vitals(clock := FakeClock())
    reward = vitals.worker("reward", 0)
    assert vitals.worker("reward", 0) is reward
    assert (reward.state().doing, reward.state().what) == ("waiting", SAID_NOTHING)
    with reward.working("first", deadline_seconds=10.0):
        await clock.advance(2.0)
        with reward.working("second", deadline_seconds=3.0):
            await clock.advance(4.0)
            state = reward.state()
            assert (state.doing, state.what, state.since_seconds) == ("working", "second", 4.0)
            assert (state.overdue_seconds, state.busy_seconds) == (1.0, 6.0)
        assert (reward.state().what, reward.state().overdue_seconds) == ("first", -4.0)
    await clock.advance(5.0)
    assert (reward.state().busy_seconds, vitals.quiet_seconds()) == (6.0, 5.0), "overlapping work counts once"
    reward.stopped()
    assert [s.doing for s in vitals.snapshot()] == ["stopped"]


async def test_repeated_waits_for_the_same_thing_count_as_one() -> None:
    clock = FakeClock()
    worker = Vitals(clock).worker("trainer", 0)
    for _ in range(3):
        with worker.waiting("samples of step 3"):
            await clock.advance(1.0)
    assert (worker.state().what, worker.state().since_seconds) == ("samples of step 3", 3.0)
    with worker.working("step 3", deadline_seconds=9.0):
        pass
    with worker.waiting("samples of step 3"):
        assert worker.state().since_seconds == 0.0


def test_work_ends_when_it_fails() -> None:
    worker = Vitals(FakeClock()).worker("trainer", 0)
    with pytest.raises(KeyError), worker.working("step 3", deadline_seconds=9.0):
        raise KeyError
    assert worker.state().doing == "waiting"


async def test_calls_share_one_daemon_thread() -> None:
    thread = ComputeThread("reward-0")
    first, second = [await thread.in_thread(threading.current_thread) for _ in range(2)]
    assert first is second
    assert first.daemon
    assert first is not threading.current_thread()
    assert await asyncio.gather(thread.in_thread(pow, 2, 3), thread.in_thread(int, "ff", base=16)) == [8, 255]
    thread.close()
    first.join(timeout=60)
    assert not first.is_alive()


@pytest.mark.parametrize(
    ("raised", "arrives"),
    [
        (ValueError("no digits"), ValueError),
        (StopIteration(), RuntimeError),
        (SystemExit(3), RuntimeError),
        (KeyboardInterrupt(), RuntimeError),
        (asyncio.CancelledError(), RuntimeError),
        (FutureCancelled(), RuntimeError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
async def test_any_exception_of_a_call_reaches_the_caller(raised: BaseException, arrives: type[Exception]) -> None:
    def fail() -> None:
        raise raised

    thread = ComputeThread("reward-0")
    with pytest.raises(arrives):
        await thread.in_thread(fail)
    assert await thread.in_thread(pow, 2, 3) == 8, "the thread lives on"


async def test_a_cancelled_call_leaves_its_thread_behind_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        go_on.wait(60)

    thread = ComputeThread("reward-0")
    hung = asyncio.create_task(thread.in_thread(hang))
    queued = asyncio.create_task(thread.in_thread(pow, 2, 3))
    while not begun.is_set():
        await asyncio.sleep(0)
    queued.cancel()
    await asyncio.wait([queued])
    assert not caplog.records, "what had not begun leaves nothing behind"
    hung.cancel()
    await asyncio.wait([hung])
    assert hung.cancelled()
    assert "reward-0: cancelled while it computes; its thread keeps running" in caplog.text
    fresh = await thread.in_thread(threading.current_thread)
    assert fresh.name == "reward-0/2"
    go_on.set()


class Scripted(Service):
    def __init__(
        self, stage: str, vitals: Vitals, script: Callable[["Scripted"], Awaitable[None]] | None = None, worker: int = 0
    ) -> None:
        super().__init__(stage, worker, vitals)
        self.script = script
        self.ended = ""

    async def run(self) -> None:
        try:
            await (self.script(self) if self.script else self._wait_for_stop())
            self.ended = "returned"
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise

    async def _wait_for_stop(self) -> None:
        with self.vitals.waiting("prompts"):
            await self.stopping.wait()


async def fail(service: Scripted) -> None:
    raise ValueError("no digits")


async def finish(service: Scripted) -> None:
    return


async def hang(service: Scripted) -> None:
    with service.vitals.waiting("what never comes"):
        await asyncio.Event().wait()


async def work_on(service: Scripted) -> None:
    with service.vitals.working("step 3", deadline_seconds=1e9):
        await service.stopping.wait()


async def supervise(
    clock: FakeClock, vitals: Vitals, services: list[Scripted], seconds: float, stop: asyncio.Event | None = None
) -> None:
    supervisor = Supervisor(vitals, stall_seconds=60.0, grace_seconds=10.0)
    run = asyncio.create_task(supervisor.run(services, stop or asyncio.Event()))
    await clock.advance(seconds)
    assert run.done(), "the supervisor hangs"
    await run


def supervised(*scripts: tuple[str, Callable[[Scripted], Awaitable[None]] | None], seconds: float = 0.0) -> list[str]:
    async def main() -> list[str]:
        vitals = Vitals(clock := FakeClock())
        services = [Scripted(stage, vitals, script) for stage, script in scripts]
        try:
            await supervise(clock, vitals, services, seconds)
        finally:
            assert len(asyncio.all_tasks()) == 1, "a task outlives the run"
        return [service.ended for service in services]

    return asyncio.run(main())


def test_the_run_is_over_when_the_trainer_is() -> None:
    assert supervised(("generator", None), ("reward", finish), ("trainer", finish)) == ["returned"] * 3


def test_without_a_final_stage_the_run_ends_when_all_stages_return() -> None:
    assert supervised(("generator", finish), ("reward", finish)) == ["returned"] * 2
    with pytest.raises(LoopStalled):
        supervised(("generator", finish), ("reward", None), seconds=100.0)


def test_the_first_failing_stage_ends_the_others_and_is_named() -> None:
    with pytest.raises(StageFailed, match="reward 0: failed: ValueError: no digits") as caught:
        supervised(("generator", work_on), ("reward", fail), ("trainer", hang))
    assert (caught.value.stage, caught.value.worker) == ("reward", 0)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (InvalidRequest("sources[0]", "x", "must be finite"), StageFailed, "reward 0: failed: sources[0]: must be"),
        (RecordUndeliverable("generator", "s", "1/0/0", ""), RecordUndeliverable, "generator: could not handle 1/0/0"),
        (asyncio.CancelledError(), StageFailed, "reward 0: failed: it was cancelled, but not by the supervisor"),
    ],
    ids=["ours without its class", "of a stage as it is", "cancelled from elsewhere"],
)
def test_the_message_of_a_stage_error_is_reported(error: BaseException, kind: type[Exception], told: str) -> None:
    async def fail(service: Scripted) -> None:
        raise error

    with pytest.raises(kind, match=re.escape(told)):
        supervised(("reward", fail), ("trainer", hang))


def test_work_past_its_deadline_is_named() -> None:
    async def score(service: Scripted) -> None:
        with service.vitals.working("reward of sums/3/7/1", deadline_seconds=60.0):
            await asyncio.Event().wait()

    with pytest.raises(StageStalled, match="reward 0: stalled: reward of sums/3/7/1 takes 61 s, longer than its"):
        supervised(("reward", score), ("trainer", hang), seconds=70.0)


def test_a_deadlock_is_named_wait_by_wait() -> None:
    with pytest.raises(LoopStalled) as caught:
        supervised(("view", hang), ("generator", None), ("trainer", hang), seconds=70.0)
    assert str(caught.value).splitlines() == [
        "generator 0: stalled: no worker has worked for 61 s",
        "  generator 0 waits for prompts, from prompts or trainer (61 s)",
        "  trainer 0 waits for what never comes, from prompts or generator or reward or reference or critic (61 s)",
        "  view 0 waits for what never comes, from generator or trainer (61 s)",
    ]


def test_long_work_of_one_stage_is_no_stall() -> None:
    async def slowly(service: Scripted) -> None:
        for step in range(3):
            with service.vitals.working(f"step {step}", deadline_seconds=100.0):
                await service.vitals._clock.sleep(59.0)
            with service.vitals.waiting("samples"):
                await service.vitals._clock.sleep(59.0)

    assert supervised(("generator", None), ("trainer", slowly), seconds=400.0) == ["returned"] * 2


async def test_time_before_the_run_is_no_stall() -> None:
    vitals = Vitals(clock := FakeClock())
    services = [Scripted("trainer", vitals)]
    await clock.advance(1000.0)  # models were loaded
    stop = asyncio.Event()
    run = asyncio.create_task(Supervisor(vitals, stall_seconds=60.0).run(services, stop))
    await clock.advance(50.0)
    assert not run.done()
    stop.set()
    await clock.settle()
    await run


async def test_a_stop_waits_for_work_to_finish() -> None:
    async def checkpoint_first(service: Scripted) -> None:
        await service.stopping.wait()
        with service.vitals.working("checkpoint", deadline_seconds=60.0):
            await clock.sleep(8.0)

    vitals = Vitals(clock := FakeClock())
    services = [Scripted("generator", vitals), Scripted("trainer", vitals, checkpoint_first)]
    stop = asyncio.Event()
    stop.set()
    await supervise(clock, vitals, services, 9.0, stop)
    assert [service.ended for service in services] == ["returned", "returned"]
    assert {state.doing for state in vitals.snapshot()} == {"stopped"}


def test_a_service_that_does_not_stop_is_cancelled_and_named(caplog: pytest.LogCaptureFixture) -> None:
    assert supervised(("reward", hang), ("trainer", finish), seconds=20.0) == ["cancelled", "returned"]
    assert "reward 0 did not stop within 10 s and is cancelled" in caplog.text


async def test_a_service_that_refuses_cancellation_is_abandoned_and_named(caplog: pytest.LogCaptureFixture) -> None:
    released = asyncio.Event()

    async def refuse(service: Scripted) -> None:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue

    vitals = Vitals(clock := FakeClock())
    await supervise(clock, vitals, [Scripted("reward", vitals, refuse), Scripted("trainer", vitals, finish)], 50.0)
    assert "reward 0 does not stop although it was cancelled, and is left behind" in caplog.text
    released.set()
    await clock.settle()


def test_a_failure_while_stopping_is_not_lost() -> None:
    async def fail_at_the_end(service: Scripted) -> None:
        await service.stopping.wait()
        raise OSError("disk full")

    with pytest.raises(StageFailed, match="view 0: failed: OSError: disk full"):
        supervised(("view", fail_at_the_end), ("trainer", finish))


def test_a_failure_while_cancelled_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail_when_cancelled(service: Scripted) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("disk full")

    with caplog.at_level(logging.ERROR), pytest.raises(StageFailed, match="reward 0"):
        supervised(("view", fail_when_cancelled), ("reward", fail))
    assert "view 0 failed while it was cancelled" in caplog.text
    assert "disk full" in caplog.text


@pytest.mark.parametrize("fails", [True, False])
async def test_a_stop_that_fails_is_named_and_one_that_hangs_ends_with_the_grace(fails: bool) -> None:
    class Stubborn(Scripted):
        async def stop(self) -> None:
            if fails:
                raise OSError("no such socket")
            await asyncio.Event().wait()

    vitals = Vitals(clock := FakeClock())
    named = pytest.raises(StageFailed, match="view 0: failed: OSError: no such socket") if fails else nullcontext()
    with named:
        await supervise(clock, vitals, [Stubborn("view", vitals), Scripted("trainer", vitals, finish)], 30.0)
    assert len(asyncio.all_tasks()) == 1, "a task outlives the run"


async def test_cancelling_the_run_cancels_the_services() -> None:
    vitals = Vitals(clock := FakeClock())
    services = [Scripted("generator", vitals), Scripted("trainer", vitals, hang)]
    run = asyncio.create_task(Supervisor(vitals, stall_seconds=60.0).run(services, asyncio.Event()))
    await clock.settle()
    run.cancel()
    await asyncio.wait([run])
    assert run.cancelled()
    assert [service.ended for service in services] == ["cancelled", "cancelled"]


@pytest.mark.parametrize("news", ["work in another thread", "trouble", "stop"])
async def test_a_change_sends_a_heartbeat_at_once(news: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vitals, stopping, begun, over = Vitals(), asyncio.Event(), threading.Event(), threading.Event()
    worker, beats = vitals.worker("reward", 0), Beats(vitals)
    monkeypatch.setattr(beats, "_pace", Pace(1000.0, 1000.0))

    def work() -> None:
        begun.wait()
        with worker.working("scoring", deadline_seconds=60.0):
            over.wait()

    thread = threading.Thread(target=work)
    thread.start()
    beat = asyncio.create_task(beats.next("waits", stopping))
    try:
        await asyncio.sleep(0.05)
        assert not beat.done()
        match news:
            case "trouble":
                worker.in_trouble("no weights are stored: disk full")
            case "stop":
                stopping.set()
            case _:
                begun.set()
        await asyncio.wait_for(beat, 60.0)
    finally:
        begun.set()
        over.set()
        thread.join()


def test_continued_work_changes_only_the_times_of_a_heartbeat() -> None:
    vitals = Vitals()
    with vitals.worker("reward", 0).working("scoring", deadline_seconds=60.0):
        before = vitals.snapshot()[0]
        time.sleep(0.01)
        after = vitals.snapshot()[0]
    assert after.busy_seconds > before.busy_seconds
    assert after.without_times() == before.without_times()


@pytest.mark.parametrize(("seconds", "is_told"), [(SILENT_SECONDS - 0.5, False), (SILENT_SECONDS + 0.5, True)])
def test_all_views_report_a_silent_worker_after_the_same_time(seconds: float, is_told: bool) -> None:
    clock = FakeClock()
    known, live = KnownRun(clock), Live()
    known.tell(replace(snapshot()[0], stage="reward"), beat(), load())
    asyncio.run(clock.advance(seconds))
    view = LiveView(run=known.run, now=clock.now())
    live.seen(view)
    [state] = process_states(known.run, clock.now())
    [page], [tile] = live.content(clock.now())["workers"], live.content(clock.now())["generators"]
    told = {"roster": state.doing, "dashboard": page["doing"]}
    told |= {"its generators": "silent" if tile["silent"] else "working", "top": _row(state)[2]}
    plugin = "".join(printed(table_of(document_of(view), [])))
    told |= {"kubectl rlhf top": "silent" if "silent" in plugin else "working"}
    assert set(told.values()) == {"silent" if is_told else "working"}, told


def test_only_the_trainer_keeps_more_versions_with_staleness() -> None:
    """Receivers take the newest version and are asked for at most the newest two."""
    jobs = [a_job(training={"maxStaleness": staleness}) for staleness in (0, 3)]
    assert [kept_versions(job) for job in jobs] == [2, 5]
    assert [kept_versions(jobs[1], stage) for stage in ("generator", "critic")] == [2, 2]

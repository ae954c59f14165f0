"""Bus, vitals, threads and supervisor, each driven by events and a clock that stands still until told."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError as FutureCancelled

import pytest

from rlhfspec.errors import (
    InvalidRequest,
    LoopStalled,
    RecordUndeliverable,
    StageFailed,
    StageStalled,
)
from rlhfspec.loop import subject
from rlhfspec.records import Demand, Sample, Score, StepReport, Weights
from rlhfspec.service.base import Service
from rlhfspec.service.bus import Bus, kept_in_progress
from rlhfspec.service.dead_letters import DeadLetterWatch
from rlhfspec.service.supervisor import Supervisor
from rlhfspec.service.threads import ComputeThread
from rlhfspec.service.vitals import SAID_NOTHING, Vitals
from rlhfspec.transport.clock import FakeClock
from rlhfspec.transport.memory import MemoryTransport
from rlhfspec.wire.codec import encode

ALL = {"prompts": 1, "generator": 2, "reward": 2, "reference": 1, "trainer": 1, "view": 1}
SAMPLE = Sample(
    id="sums/1/0/0", job="sums", step=1, prompt=0, replica=0, prompt_text="2+2=", prompt_token_ids=(1,),
    columns_json="{}", text="4", token_ids=(2,), log_probs=(-0.5,), tempered_log_probs=(-0.5,), weights_versions=(0,),
    finish_reason="stop",
)  # fmt: skip
WEIGHTS = Weights(id="sums/weights/1", job="sums", version=1, role="policy", uri="memory:1", digest="00")
SCORE = Score(id="sums/1/0/0/reward", sample_id=SAMPLE.id, job="sums", step=1, stage="reward", values=(1.0,))


# --- Bus ---------------------------------------------------------------------------------------------------------


def with_bus(check: Callable[[Bus, FakeClock], Awaitable[None]], **workers: int) -> None:
    async def main() -> None:
        clock = FakeClock()
        transport = MemoryTransport(clock=clock)
        await check(await Bus.open(transport, "sums", workers=workers or ALL, clock=clock), clock)

    asyncio.run(main())


def test_workers_compete_for_samples_and_each_gets_the_weights() -> None:
    async def check(bus: Bus, clock: FakeClock) -> None:
        scorers = [await bus.of("reward", worker).subscribe(Sample) for worker in (0, 1)]
        generators = [await bus.of("generator", worker).subscribe(Weights) for worker in (0, 1)]
        assert await bus.of("generator").publish(SAMPLE)
        assert not await bus.of("generator", 1).publish(SAMPLE), "the second generator made the same"
        await bus.of("trainer").publish(WEIGHTS)
        assert [len(await inbox.pull(max_records=9, timeout_seconds=0)) for inbox in scorers] == [1, 0]
        got = [await inbox.pull(max_records=9, timeout_seconds=0) for inbox in generators]
        assert [[delivery.record for delivery in each] for each in got] == [[WEIGHTS], [WEIGHTS]]

    with_bus(check)


def test_a_record_goes_when_all_who_run_have_it() -> None:
    async def check(bus: Bus, clock: FakeClock) -> None:
        assert bus.consumer_names(Sample) == ["reward", "reference", "trainer", "view"], "no critic runs"
        assert bus.consumer_names(Weights) == ["prompts-0", "generator-0", "generator-1"]
        await bus.of("generator").publish(SAMPLE)
        for name in bus.consumer_names(Sample):
            inbox = await bus.of(name).subscribe(Sample)
            for delivery in await inbox.pull(max_records=9, timeout_seconds=0):
                await delivery.ack()
        assert isinstance(bus.transport, MemoryTransport)
        assert not bus.transport._subjects[subject("sums", Sample)].stored

    with_bus(check)


def test_nobody_speaks_or_hears_but_by_the_map() -> None:
    async def check(bus: Bus, clock: FakeClock) -> None:
        with pytest.raises(InvalidRequest, match="reward does not produce it"):
            await bus.of("reward").publish(SAMPLE)
        with pytest.raises(InvalidRequest, match="reward does not consume it"):
            await bus.of("reward").subscribe(Demand)
        with pytest.raises(InvalidRequest, match="view does not produce it"):
            await bus.of("view").publish(SCORE)
        with pytest.raises(InvalidRequest, match="stage: this job runs 0 workers of it"):
            bus.of("critic")
        with pytest.raises(InvalidRequest, match="stage: this job runs 2 workers of it"):
            bus.of("reward", 2)
        with pytest.raises(InvalidRequest, match="must be one of prompts, generator"):
            await Bus.open(bus.transport, "sums", workers={"rewards": 1})

    with_bus(check)


def test_an_observer_misses_nothing() -> None:
    async def check(bus: Bus, clock: FakeClock) -> None:
        report = StepReport(id="sums/1", job="sums", step=1, weights_version=1, weights_digest="00", metrics_json="{}")
        await bus.of("trainer").publish(report)
        inbox = await bus.of("view").subscribe(StepReport)
        assert [d.record for d in await inbox.pull(max_records=9, timeout_seconds=0)] == [report]

    with_bus(check)


def test_what_cannot_be_decoded_never_reaches_the_stage_and_ends_the_run_by_name() -> None:
    async def check(bus: Bus, clock: FakeClock) -> None:
        inbox = await bus.of("reward").subscribe(Sample)
        topic = subject("sums", Sample)
        await bus.transport.publish(topic, b"\xff", id="broken")
        await bus.transport.publish(topic, encode(SCORE), id="mistaken")
        await bus.of("generator").publish(SAMPLE)
        assert [d.record for d in await inbox.pull(max_records=9, timeout_seconds=1)] == [SAMPLE]
        waiting = asyncio.create_task(inbox.pull(max_records=9, timeout_seconds=5))
        await bus.transport.publish(topic, b"\xff", id="broken too")
        await clock.advance(4.0)
        assert not waiting.done(), "a broken record does not end the wait"
        await clock.advance(2.0)
        assert await waiting == []
        watch = DeadLetterWatch(bus, Vitals(clock))
        with pytest.raises(RecordUndeliverable, match=r"reward 0: could not handle broken of rlhf\.sums\.sample: malf"):
            await watch.run()
        with pytest.raises(RecordUndeliverable, match=r"handle mistaken of .*: a Score among records of Sample"):
            await watch.run()

    with_bus(check)


def test_a_dead_letter_names_the_worker_whose_name_it_had() -> None:
    async def check(bus: Bus, clock: FakeClock) -> None:
        inbox = await bus.of("generator", 1).subscribe(Weights)
        await bus.of("trainer").publish(WEIGHTS)
        [delivery] = await inbox.pull(max_records=1, timeout_seconds=0)
        await delivery.term("not these")
        with pytest.raises(RecordUndeliverable) as caught:
            await DeadLetterWatch(bus, Vitals(clock)).run()
        assert (caught.value.stage, caught.value.worker, caught.value.record_id) == ("generator", 1, WEIGHTS.id)

    with_bus(check)


def test_kept_in_progress_is_delivered_to_nobody_else() -> None:
    async def check(bus: Bus, clock: FakeClock) -> None:
        inbox = await bus.of("reward").subscribe(Sample, ack_wait_seconds=3.0)
        await bus.of("generator").publish(SAMPLE)
        deliveries = await inbox.pull(max_records=9, timeout_seconds=0)
        async with kept_in_progress(lambda: deliveries, every_seconds=1.0, clock=clock):
            await clock.advance(20.0)
            assert await inbox.pull(max_records=9, timeout_seconds=0) == []
        await clock.advance(4.0)
        [again] = await inbox.pull(max_records=9, timeout_seconds=0)
        assert again.num_deliveries == 2

    with_bus(check)


# --- Vitals ------------------------------------------------------------------------------------------------------


def test_vitals_say_who_does_what_since_when() -> None:
    async def main() -> None:
        clock = FakeClock()
        vitals = Vitals(clock)
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

    asyncio.run(main())


def test_waiting_again_for_the_same_is_one_wait() -> None:
    async def main() -> None:
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

    asyncio.run(main())


def test_work_ends_when_it_fails() -> None:
    worker = Vitals(FakeClock()).worker("trainer", 0)
    with pytest.raises(KeyError), worker.working("step 3", deadline_seconds=9.0):
        raise KeyError
    assert worker.state().doing == "waiting"


# --- Threads -----------------------------------------------------------------------------------------------------


def test_calls_share_one_daemon_thread() -> None:
    async def main() -> None:
        thread = ComputeThread("reward-0")
        first, second = [await thread.in_thread(threading.current_thread) for _ in range(2)]
        assert first is second
        assert first.daemon
        assert first is not threading.current_thread()
        assert await asyncio.gather(thread.in_thread(pow, 2, 3), thread.in_thread(int, "ff", base=16)) == [8, 255]
        thread.close()
        first.join(timeout=10)
        assert not first.is_alive()

    asyncio.run(main())


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
def test_whatever_a_call_raises_arrives(raised: BaseException, arrives: type[Exception]) -> None:
    def fail() -> None:
        raise raised

    async def main() -> None:
        thread = ComputeThread("reward-0")
        with pytest.raises(arrives):
            await thread.in_thread(fail)
        assert await thread.in_thread(pow, 2, 3) == 8, "the thread lives on"

    asyncio.run(main())


def test_a_cancelled_call_leaves_its_thread_behind_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hang() -> threading.Thread:
        begun.set()
        go_on.wait(60)
        return threading.current_thread()

    async def main() -> None:
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
        assert "reward-0: cancelled while it computes; its thread is left behind" in caplog.text
        fresh = await thread.in_thread(threading.current_thread)
        assert fresh.name == "reward-0/2"

    asyncio.run(main())
    go_on.set()


def test_a_hung_call_does_not_keep_the_process() -> None:
    code = (
        "import asyncio, threading\n"
        "from rlhfspec.service.threads import ComputeThread\n"
        "async def main():\n"
        "    begun = threading.Event()\n"
        "    hang = lambda: (begun.set(), threading.Event().wait())\n"
        "    call = asyncio.create_task(ComputeThread('x').in_thread(hang))\n"
        "    while not begun.is_set(): await asyncio.sleep(0)\n"
        "    call.cancel()\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- Supervisor --------------------------------------------------------------------------------------------------


class Scripted(Service):
    """Does what the test says, then notes how it ended."""

    def __init__(
        self, stage: str, vitals: Vitals, script: Callable[[Scripted], Awaitable[None]] | None = None, worker: int = 0
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
    """Runs services with these scripts for so long; raises what the supervisor raises, else how each ended."""

    async def main() -> list[str]:
        clock = FakeClock()
        vitals = Vitals(clock)
        services = [Scripted(stage, vitals, script) for stage, script in scripts]
        try:
            await supervise(clock, vitals, services, seconds)
        finally:
            assert len(asyncio.all_tasks()) == 1, "a task outlives the run"
        return [service.ended for service in services]

    return asyncio.run(main())


def test_the_run_is_over_when_the_trainer_is() -> None:
    assert supervised(("generator", None), ("reward", finish), ("trainer", finish)) == ["returned"] * 3


def test_without_a_final_stage_all_must_return() -> None:
    assert supervised(("generator", finish), ("reward", finish)) == ["returned"] * 2
    with pytest.raises(LoopStalled):
        supervised(("generator", finish), ("reward", None), seconds=100.0)


def test_the_first_that_raises_ends_the_others_and_is_named() -> None:
    with pytest.raises(StageFailed, match="reward 0: failed: ValueError: no digits") as caught:
        supervised(("generator", work_on), ("reward", fail), ("trainer", hang))
    assert (caught.value.stage, caught.value.worker) == ("reward", 0)
    assert isinstance(caught.value.__cause__, ValueError)


def test_our_own_errors_need_no_class_name() -> None:
    async def refuse(service: Scripted) -> None:
        raise InvalidRequest("rewards.sources[0]", "x", "must be finite")

    with pytest.raises(StageFailed, match=r"reward 0: failed: rewards.sources\[0\]: must be finite"):
        supervised(("reward", refuse))


def test_a_stage_error_is_raised_as_it_is() -> None:
    async def undeliverable(service: Scripted) -> None:
        raise RecordUndeliverable("generator", 1, "rlhf.sums.prompt", "sums/1/0/0", "poison")

    with pytest.raises(RecordUndeliverable, match="generator 1: could not handle sums/1/0/0"):
        supervised(("supervisor", undeliverable), ("trainer", hang))


def test_a_cancellation_from_elsewhere_is_a_failure() -> None:
    async def cancel_itself(service: Scripted) -> None:
        raise asyncio.CancelledError

    with pytest.raises(StageFailed, match="reward 0: failed: it was cancelled, but not by the supervisor"):
        supervised(("reward", cancel_itself), ("trainer", hang))


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
        "generator 0: stalled: nobody has worked for 61 s",
        "  generator 0 waits for prompts, from prompts or trainer (61 s)",
        "  trainer 0 waits for what never comes, from generator or reward or reference or critic (61 s)",
        "  view 0 waits for what never comes, from generator or trainer (61 s)",
    ]


def test_who_works_keeps_the_others_waiting() -> None:
    async def slowly(service: Scripted) -> None:
        for step in range(3):
            with service.vitals.working(f"step {step}", deadline_seconds=100.0):
                await service.vitals._clock.sleep(59.0)
            with service.vitals.waiting("samples"):
                await service.vitals._clock.sleep(59.0)

    assert supervised(("generator", None), ("trainer", slowly), seconds=400.0) == ["returned"] * 2


def test_time_before_the_run_is_no_stall() -> None:
    async def main() -> None:
        clock = FakeClock()
        vitals = Vitals(clock)
        services = [Scripted("trainer", vitals)]
        await clock.advance(1000.0)  # models were loaded
        stop = asyncio.Event()
        run = asyncio.create_task(Supervisor(vitals, stall_seconds=60.0).run(services, stop))
        await clock.advance(50.0)
        assert not run.done()
        stop.set()
        await clock.settle()
        await run

    asyncio.run(main())


def test_stop_is_asked_for_and_waited_for() -> None:
    async def main() -> None:
        async def checkpoint_first(service: Scripted) -> None:
            await service.stopping.wait()
            with service.vitals.working("checkpoint", deadline_seconds=60.0):
                await clock.sleep(8.0)

        clock = FakeClock()
        vitals = Vitals(clock)
        services = [Scripted("generator", vitals), Scripted("trainer", vitals, checkpoint_first)]
        stop = asyncio.Event()
        stop.set()
        await supervise(clock, vitals, services, 9.0, stop)
        assert [service.ended for service in services] == ["returned", "returned"]
        assert {state.doing for state in vitals.snapshot()} == {"stopped"}

    asyncio.run(main())


def test_who_does_not_stop_is_cancelled_and_named(caplog: pytest.LogCaptureFixture) -> None:
    assert supervised(("reward", hang), ("trainer", finish), seconds=20.0) == ["cancelled", "returned"]
    assert "reward 0 did not stop within 10 s and is cancelled" in caplog.text


def test_who_refuses_its_cancellation_is_left_behind_and_named(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        released = asyncio.Event()

        async def refuse(service: Scripted) -> None:
            while not released.is_set():
                try:
                    await released.wait()
                except asyncio.CancelledError:
                    continue

        clock = FakeClock()
        vitals = Vitals(clock)
        await supervise(clock, vitals, [Scripted("reward", vitals, refuse), Scripted("trainer", vitals, finish)], 50.0)
        assert "reward 0 refuses its cancellation and is left behind" in caplog.text
        released.set()
        await clock.settle()

    asyncio.run(main())


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


def test_a_stop_that_fails_is_named() -> None:
    class Stubborn(Scripted):
        async def stop(self) -> None:
            raise OSError("no such socket")

    async def main() -> None:
        clock = FakeClock()
        vitals = Vitals(clock)
        with pytest.raises(StageFailed, match="view 0: failed: OSError: no such socket"):
            await supervise(clock, vitals, [Stubborn("view", vitals), Scripted("trainer", vitals, finish)], 30.0)

    asyncio.run(main())


def test_a_stop_that_hangs_ends_with_the_grace() -> None:
    class Stubborn(Scripted):
        async def stop(self) -> None:
            await asyncio.Event().wait()

    async def main() -> None:
        clock = FakeClock()
        vitals = Vitals(clock)
        await supervise(clock, vitals, [Stubborn("view", vitals), Scripted("trainer", vitals, finish)], 30.0)
        assert len(asyncio.all_tasks()) == 1, "a task outlives the run"

    asyncio.run(main())


def test_cancelling_the_run_cancels_the_services() -> None:
    async def main() -> None:
        clock = FakeClock()
        vitals = Vitals(clock)
        services = [Scripted("generator", vitals), Scripted("trainer", vitals, hang)]
        run = asyncio.create_task(Supervisor(vitals, stall_seconds=60.0).run(services, asyncio.Event()))
        await clock.settle()
        run.cancel()
        await asyncio.wait([run])
        assert run.cancelled()
        assert [service.ended for service in services] == ["cancelled", "cancelled"]

    asyncio.run(main())

"""Rights and retention of records follow THE MAP."""

import asyncio
from dataclasses import replace

import pytest
from example_records import example_sample

from rlhfspec.errors import InvalidRequest, MalformedRecord, RecordUndeliverable
from rlhfspec.messages.loop import ACK_WAIT_SECONDS
from rlhfspec.messages.records import Demand, Sample, Score, StepReport, Weights
from rlhfspec.messages.records.metrics import example_step
from rlhfspec.messages.transport.clock import FakeClock
from rlhfspec.messages.transport.dead_letters import decode
from rlhfspec.messages.transport.memory import MemoryTransport
from rlhfspec.messages.wire.codec import encode
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.dead_letters import DeadLetterWatch
from rlhfspec.stage.vitals import Vitals

ALL = {"prompts": 1, "generator": 2, "reward": 2, "reference": 1, "trainer": 1, "view": 1}
SAMPLE = example_sample()
WEIGHTS = Weights(id="sums/weights/1", job="sums", version=1, role="policy", uri="memory:1", digest="00")
SCORE = Score(id="sums/1/0/0/reward", sample_id=SAMPLE.id, job="sums", step=1, stage="reward", values=(1.0,))


async def open_bus() -> Bus:
    clock = FakeClock()
    return await Bus.open(MemoryTransport(clock=clock), "sums", workers=ALL, clock=clock)


async def test_workers_compete_for_samples_and_each_gets_the_weights() -> None:
    bus = await open_bus()
    scorers = [await bus.of("reward", worker).subscribe(Sample) for worker in (0, 1)]
    generators = [await bus.of("generator", worker).subscribe(Weights) for worker in (0, 1)]
    assert await bus.of("generator").publish(SAMPLE)
    assert not await bus.of("generator", 1).publish(SAMPLE), "the second generator made the same"
    await bus.of("trainer").publish(WEIGHTS)
    assert [len(await inbox.pull(max_records=9, timeout_seconds=0)) for inbox in scorers] == [1, 0]
    got = [await inbox.pull(max_records=9, timeout_seconds=0) for inbox in generators]
    assert [[delivery.record for delivery in each] for each in got] == [[WEIGHTS], [WEIGHTS]]


async def test_a_record_is_removed_once_all_running_consumers_acknowledged_it() -> None:
    bus = await open_bus()
    samples = bus.transport._subjects[bus.subject(Sample)]
    await bus.of("generator").publish(SAMPLE)
    for name in ("reward", "reference", "trainer"):  # no critic runs, and nobody waits for the view
        assert samples.stored
        inbox = await bus.of(name).subscribe(Sample)
        for delivery in await inbox.pull(max_records=9, timeout_seconds=0):
            await delivery.ack()
    assert not samples.stored


async def test_stages_publish_and_subscribe_only_as_the_map_allows() -> None:
    bus = await open_bus()
    with pytest.raises(InvalidRequest, match="reward does not produce it"):
        await bus.of("reward").publish(SAMPLE)
    with pytest.raises(InvalidRequest, match="reward does not consume it"):
        await bus.of("reward").subscribe(Demand)
    with pytest.raises(InvalidRequest, match="view does not produce it"):
        await bus.of("view").publish(SCORE)
    with pytest.raises(InvalidRequest, match="stage: this job runs 0 workers of this stage"):
        bus.of("critic")
    with pytest.raises(InvalidRequest, match="stage: this job runs 2 workers of this stage"):
        bus.of("reward", 2)
    with pytest.raises(InvalidRequest, match="must be one of prompts, generator"):
        await Bus.open(bus.transport, "sums", workers={"rewards": 1})


async def test_whoever_starts_late_sees_the_latest_weights() -> None:
    bus = await open_bus()
    newer = replace(WEIGHTS, id="sums/weights/2", version=2)
    await bus.of("trainer").publish(WEIGHTS)
    await bus.of("trainer").publish(newer)
    inbox = await bus.of("generator", 1).subscribe(Weights)
    assert [d.record for d in await inbox.pull(max_records=9, timeout_seconds=0)] == [newer]


async def test_another_worker_can_adopt_a_delivery_by_its_token() -> None:
    bus = await open_bus()
    async with await bus.of("reward").subscribe(Sample) as first, await bus.of("reward", 1).subscribe(Sample) as other:
        await bus.of("generator").publish(SAMPLE)
        [delivery] = await first.pull(max_records=9, timeout_seconds=0)
        adopted = await other.adopt(encode(SAMPLE), SAMPLE.id, delivery.held.token, delivery.headers)
        delivery.held.leave(None)
        assert not first._kept
        assert other._kept, "its new holder keeps it in progress"
        await bus.clock.advance(5 * ACK_WAIT_SECONDS)
        assert await first.pull(max_records=9, timeout_seconds=0) == []
        await adopted.ack()
        assert not other._kept
        await bus.clock.advance(5 * ACK_WAIT_SECONDS)
        assert await first.pull(max_records=9, timeout_seconds=0) == []
        foreign = delivery.held.token.replace("reward", "trainer")
        with pytest.raises(InvalidRequest, match="is not a delivery token"):
            await other.adopt(encode(SAMPLE), SAMPLE.id, foreign, {})
        for data, id in ((encode(SAMPLE), "another"), (encode(WEIGHTS), WEIGHTS.id), (b"nothing", SAMPLE.id)):
            with pytest.raises(MalformedRecord):
                await other.adopt(data, id, delivery.held.token, {})


async def test_an_abandoned_delivery_is_delivered_again() -> None:
    bus = await open_bus()
    async with await bus.of("reward").subscribe(Sample) as inbox:
        await bus.of("generator").publish(SAMPLE)
        [delivery] = await inbox.pull(max_records=9, timeout_seconds=0)
        delivery.held.leave(None)
        await bus.clock.advance(ACK_WAIT_SECONDS + 1)
        assert len(await inbox.pull(max_records=9, timeout_seconds=0)) == 1


async def test_records_are_not_redelivered_to_observers() -> None:
    bus = await open_bus()
    report = StepReport(id="sums/1", job="sums", metrics=example_step())
    reports, samples = [await bus.of("view").subscribe(kind) for kind in (StepReport, Sample)]
    await bus.of("trainer").publish(report)
    await bus.of("generator").publish(SAMPLE)
    for inbox, record in ((reports, report), (samples, SAMPLE)):
        assert [d.record for d in await inbox.pull(max_records=9, timeout_seconds=0)] == [record]
    await bus.clock.advance(1000.0)
    assert await samples.pull(max_records=9, timeout_seconds=0) == [], "nothing that is owed to it comes again"


async def test_two_runs_of_one_job_share_no_records() -> None:
    transport = MemoryTransport(clock=FakeClock())
    first, second = [await Bus.open(transport, "sums", uid=uid, workers=ALL) for uid in ("a1", "b2")]
    assert await first.of("generator").publish(SAMPLE)
    assert await second.of("generator").publish(SAMPLE), "what the first run did is not there already"
    for bus in (first, second):
        inbox = await bus.of("reward").subscribe(Sample)
        assert len(await inbox.pull(max_records=9, timeout_seconds=0)) == 1


async def test_malformed_records_never_reach_a_stage() -> None:
    bus = await open_bus()
    inbox = await bus.of("reward").subscribe(Sample)
    topic = bus.subject(Sample)
    await bus.transport.publish(topic, b"\xff", id="broken")
    await bus.transport.publish(topic, encode(SCORE), id="mistaken")
    await bus.of("generator").publish(SAMPLE)
    assert [d.record for d in await inbox.pull(max_records=9, timeout_seconds=1)] == [SAMPLE]
    waiting = asyncio.create_task(inbox.pull(max_records=9, timeout_seconds=5))
    await bus.transport.publish(topic, b"\xff", id="broken too")
    await bus.clock.advance(4.0)
    assert not waiting.done(), "a broken record does not end the wait"
    await bus.clock.advance(2.0)
    assert await waiting == []
    letters = await bus.dead_letters()
    reasons = [decode(message.data).reason for message in await letters.pull(9, 0.0)]
    assert reasons[0].startswith("malformed record: not protobuf")
    assert "a Score among records of Sample" in reasons[1]
    watch = asyncio.create_task(DeadLetterWatch(bus, Vitals(bus.clock)).run())
    await bus.clock.advance(5.0)
    assert not watch.done(), "no step waits for what is no record"
    inbox = await bus.of("reward").subscribe(Sample)
    await bus.of("generator").publish(replace(SAMPLE, id="sums/3/7/2"))
    [delivery] = await inbox.pull(max_records=9, timeout_seconds=1)
    await delivery.term("poison")
    with pytest.raises(RecordUndeliverable, match=r"reward: could not handle run/sums/3/7/2 of \S+: poison"):
        await watch


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "an envelope without a record"),
        (encode(replace(SAMPLE, job="other", id="other/3/7/1")), "of job 'other'"),
        (encode(replace(SAMPLE, id="sums/9/9/9")), "came under the message id"),
    ],
)
async def test_a_record_of_another_job_or_under_another_id_is_refused(data: bytes, reason: str) -> None:
    bus = await open_bus()
    inbox = await bus.of("reward").subscribe(Sample)
    await bus.transport.publish(bus.subject(Sample), data, id="run/sums/3/7/1")
    assert await inbox.pull(max_records=9, timeout_seconds=0) == []
    [letter] = await (await bus.dead_letters()).pull(9, 0.0)
    assert reason in decode(letter.data).reason
    watch = asyncio.create_task(DeadLetterWatch(bus, Vitals(bus.clock)).run())
    await bus.clock.advance(5.0)
    assert not watch.done()
    watch.cancel()


async def test_held_records_are_not_redelivered_until_their_inbox_closes() -> None:
    bus = await open_bus()
    other = await bus.of("reward", 1).subscribe(Sample)
    async with await bus.of("reward").subscribe(Sample) as inbox:
        await bus.of("generator").publish(SAMPLE)
        [_] = await inbox.pull(max_records=9, timeout_seconds=0)
        await bus.clock.advance(10 * ACK_WAIT_SECONDS)
        assert await other.pull(max_records=9, timeout_seconds=0) == []
    await bus.clock.advance(2 * ACK_WAIT_SECONDS)
    [again] = await other.pull(max_records=9, timeout_seconds=0)
    assert again.num_deliveries == 2

"""Each stage over the memory transport on a fake clock, with records late, repeated or lost."""

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from coroutines import until
from example_records import example_sample
from hypothesis import Phase, given, settings, strategies as st
from small_job import a_job
from stages import FakeSources, Stages, ends, policy_weights, prompts_for, reward_of

from rlhfspec.critic.service import CriticService
from rlhfspec.errors import RolloutError, StageFailed
from rlhfspec.messages.records import Demand, Prompt, Sample, Score, Weights
from rlhfspec.messages.transport.clock import FakeClock, SystemClock
from rlhfspec.prompts.service import prompts_of
from rlhfspec.stage.base import Service
from rlhfspec.stage.dead_letters import DeadLetterWatch
from rlhfspec.stage.supervisor import Supervisor
from rlhfspec.trainer.collector import Collector, StepShape

# Not shrunk: where a wait never ends, each attempt takes as long as a test waits for a thread.
FEW = settings(max_examples=15, phases=[Phase.explicit, Phase.generate])


def samples_of(step: int, *, prompts: int = 2, replicas: int = 2) -> list[Sample]:
    return [example_sample(prompt, replica, step=step) for prompt in range(prompts) for replica in range(replicas)]


def rewards_of(samples: list[Sample]) -> list[Score]:
    return [reward_of(sample.id, float(sample.prompt + sample.replica)) for sample in samples]


async def everything(inbox: Any) -> list[Any]:
    return [delivery.record for delivery in await inbox.pull(max_records=9999, timeout_seconds=0.0)]


@FEW
@given(staleness=st.integers(0, 3), last=st.integers(1, 6), versions=st.sets(st.integers(0, 5)).map(sorted))
def test_a_version_opens_every_step_that_it_may_sample_once(staleness: int, last: int, versions: list[int]) -> None:
    job = a_job(training={"steps": last, "promptsPerStep": 2, "maxStaleness": staleness})

    async def main() -> None:
        stages = await Stages.open(job, prompts=1, generator=1, trainer=1)
        service, inbox = stages.prompts(), await stages.bus.of("generator").subscribe(Prompt)
        task = asyncio.create_task(service.run())
        await stages.publish("trainer", *map(policy_weights, versions))
        opened = {s for v in versions for s in range(v + 1, v + 2 + staleness) if s <= last}
        wanted = {s for s in range(1, last + 1) if versions and versions[-1] < s <= versions[-1] + 1 + staleness}
        steps: list[int] = []

        async def published() -> bool:
            steps.extend([prompt.step for prompt in await everything(inbox)])
            return wanted <= set(steps)

        await until(published, "the latest version's steps are open")
        assert set(steps) <= opened, "an older version may have been passed over"
        assert all(steps.count(step) == 4 for step in steps), "two prompts, two samples each"
        await ends(task, service)

    asyncio.run(main())


async def test_a_demand_is_answered_while_weights_are_waited_for() -> None:
    """No time passes here, so neither wait may block the other."""
    job = a_job()

    stages = await Stages.open(job, prompts=1, generator=1, trainer=1)
    service, inbox = stages.prompts(), await stages.bus.of("generator").subscribe(Prompt)
    task = asyncio.create_task(service.run())
    for version in (0, 1):
        await stages.publish("trainer", policy_weights(version))
        demand = Demand(id=f"sums/{version}/demand", job="sums", step=version + 1, round=1, num_prompts=1)
        await stages.publish("trainer", demand)
        prompts: list[Prompt] = []

        async def published(prompts: list[Prompt] = prompts) -> bool:
            prompts += await everything(inbox)
            return len(prompts) >= 6

        await until(published, "both are answered")
        assert sorted(p.sort_key for p in prompts) == [(version + 1, p, r) for p in range(3) for r in range(2)]
    await ends(task, service)


class NoValues:
    version = 0
    at_once = 1

    def load_weights(self, state: Any, *, version: int) -> None:
        raise AssertionError("none came")

    def values_of(self, pairs: Any) -> list[list[float]]:
        raise AssertionError("a sample must not be scored by the wrong critic")


def _critic(stages: Stages) -> Service:
    scorer: Any = NoValues()
    bus = stages.bus.of("critic")
    return CriticService(0, stages.vitals, bus, job=stages.job, scorer=scorer, weights=stages.weights)


STAGES: dict[str, Callable[[Stages], Service]] = {"prompts": Stages.prompts, "generator": Stages.generator}
STAGES |= {"reward": lambda stages: stages.reward(FakeSources()), "critic": _critic, "trainer": Stages.trainer}
STAGES |= {"supervisor": lambda stages: DeadLetterWatch(stages.bus, stages.vitals)}


@pytest.mark.parametrize("name", STAGES)
async def test_a_stage_that_waits_stops_at_once(name: str) -> None:
    stages = await Stages.open(a_job(), prompts=1, generator=1, reward=1, critic=1, trainer=1)
    service = STAGES[name](stages)
    task = asyncio.create_task(service.run())
    await stages.publish("generator", example_sample(0, 0, step=2))  # the critic waits for version 1
    await until(lambda: service.vitals.state().what not in ("", "something it does not name"), "it waits")
    await asyncio.sleep(0.01)
    await ends(task, service)


@settings(FEW, max_examples=6)
@given(seed=st.integers(0, 999), workers=st.integers(1, 2), again=st.booleans())
def test_every_prompt_becomes_one_sample_under_new_enough_weights(seed: int, workers: int, again: bool) -> None:
    job = a_job()
    prompts = [prompt for step in (1, 2) for prompt in prompts_of(job, prompts_for(job), step, 0, None)]
    random.Random(seed).shuffle(prompts)

    async def main() -> None:
        clock = FakeClock()
        stages = await Stages.open(job, clock, seed=seed, prompts=1, generator=workers, trainer=1)
        stages.weights.put("sums", "policy", 0, {"w": torch.tensor([0.0])})
        services = [stages.generator(worker) for worker in range(workers)]
        tasks = [asyncio.create_task(service.run()) for service in services]
        inbox = await stages.bus.of("trainer").subscribe(Sample)
        await stages.publish("prompts", *prompts)
        first = await _samples(inbox, 4, clock)
        assert {sample.step for sample in first} == {1}, "step 2 waits for version 1"
        if again:  # nobody said that they are still wanted: delivered anew, and not begun anew
            await stages.redeliver(Prompt, "generator")
        await stages.publish("trainer", stages.weights.put("sums", "policy", 1, {"w": torch.tensor([1.0])}))
        second = await _samples(inbox, 4, clock)
        assert {(s.step, *s.weights_versions) for s in second} == {(2, 1, 1)}
        submitted = [name for engine in stages.engines for name in engine.submitted]
        assert set(submitted) == {p.id for p in prompts}
        assert workers > 1 or len(submitted) == len(prompts), "what runs here already is not begun anew"
        await until(lambda: "prompt" not in stages.stored(), "every prompt is acknowledged")
        for task, service in zip(tasks, services, strict=True):
            await ends(task, service)

    asyncio.run(main())


async def _samples(inbox: Any, number: int, clock: FakeClock | None = None) -> list[Any]:
    """Return `number` records; time passes meanwhile only on a given clock."""
    found: list[Any] = []

    async def pull() -> bool:
        for delivery in await inbox.pull(max_records=64, timeout_seconds=0.0):
            found.append(delivery.record)
            await delivery.ack()
        if clock is not None:
            await clock.advance(0.02)
        return len(found) >= number

    await until(pull, f"{number} records")
    assert len(found) == number
    return found


@FEW
@given(seed=st.integers(0, 999), grouping=st.sampled_from(["sample", "group"]))
def test_samples_are_scored_once_and_groups_together(seed: int, grouping: Any) -> None:
    samples = [sample for step in (1, 2) for sample in samples_of(step)]
    random.Random(seed).shuffle(samples)

    async def main() -> None:
        stages = await Stages.open(a_job(), generator=1, reward=1, trainer=1)
        sources = FakeSources(grouping)
        service = stages.reward(sources)
        task = asyncio.create_task(service.run())
        inbox = await stages.bus.of("trainer").subscribe(Score)
        await stages.publish("generator", *samples)
        scores = await _samples(inbox, 8)
        assert sorted(score.sample_id for score in scores) == sorted(sample.id for sample in samples)
        assert sorted(map(len, sources.calls)) == ([2] * 4 if grouping == "group" else [1] * 8)
        for call in sources.calls:
            assert len({name.rpartition("/")[0] for name in call}) == 1
        await ends(task, service)

    asyncio.run(main())


class SlowSources(FakeSources):
    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()

    async def score_many(self, samples: Any, *_: Any) -> list[Score]:
        await self.go_on.wait()
        return await super().score_many(samples)


async def test_a_sample_delivered_again_while_it_is_scored_is_scored_once() -> None:
    """Scoring may block the process for longer than the ack wait."""

    clock = FakeClock()
    stages = await Stages.open(a_job(), clock, generator=1, reward=1, trainer=1)
    sources = SlowSources()
    service = stages.reward(sources)
    task = asyncio.create_task(service.run())
    await stages.publish("generator", example_sample(0, 0))
    await until(lambda: service._held, "it is being scored")
    clock._now += 61.0  # at once, so that nobody could say that it is still wanted
    await stages.publish("generator", example_sample(0, 1))
    await clock.settle()
    assert service._held["sums/1/0/0"].num_deliveries == 2
    sources.go_on.set()
    await until(lambda: len(sources.calls) == 2 and not service._held, "both are scored")
    assert sorted(map(tuple, sources.calls)) == [("sums/1/0/0",), ("sums/1/0/1",)]
    await ends(task, service)


@FEW
@given(seed=st.integers(0, 999), staleness=st.integers(0, 2))
def test_steps_are_trained_in_order_whatever_arrives_when(seed: int, staleness: int) -> None:
    job = a_job(training={"steps": 3, "promptsPerStep": 2, "maxStaleness": staleness})
    samples = [sample for step in (1, 2, 3) for sample in samples_of(step)]
    records: list[tuple[str, Any]] = [("generator", sample) for sample in samples]
    records += [("reward", score) for score in rewards_of(samples)]
    random.Random(seed).shuffle(records)

    async def main() -> None:
        stages = await Stages.open(job, generator=1, reward=1, trainer=1)
        service = stages.trainer()
        for stage, record in records:
            await stages.publish(stage, record)
        await asyncio.wait_for(service.run(), 60.0)
        service.close()
        wanted = [tuple(sample.id for sample in samples_of(step)) for step in (1, 2, 3)]
        assert [rollouts.ids for rollouts in stages.learner.learnt] == wanted
        assert all(rollouts.rewards.tolist() == [0.0, 1.0, 1.0, 2.0] for rollouts in stages.learner.learnt)
        assert [trained.step for trained in stages.recorder.trained] == [1, 2, 3]
        assert stages.recorder.checkpoints == [3]
        assert stages.has_read("trainer")

    asyncio.run(main())


async def test_a_restarted_trainer_publishes_its_weights_as_the_latest() -> None:
    """A later version may have existed before; new workers must see the one that the trainer publishes."""

    stages = await Stages.open(a_job(), generator=1, reward=1, trainer=1)
    seen = []
    async with await stages.bus.of("generator").subscribe(Weights) as inbox:
        for _ in range(2):
            service = stages.trainer()
            task = asyncio.create_task(service.run())
            [delivery] = await inbox.pull(max_records=8, timeout_seconds=5.0)
            seen.append(delivery.record)
            await ends(task, service)
    assert [record.version for record in seen] == [0, 0]


async def test_what_a_step_was_trained_on_is_acknowledged_once_a_checkpoint_covers_it() -> None:
    stages = await Stages.open(a_job(checkpoint={"everySteps": 2}), generator=1, reward=1, trainer=1)
    service = stages.trainer()
    task = asyncio.create_task(service.run())
    await stages.publish("generator", *samples_of(1))
    await stages.publish("reward", *rewards_of(samples_of(1)))
    trained = ("training", 1)
    await until(lambda: stages.learner.version == 1 and trained not in service._collectors, "step 1 is trained")
    await stages.publish("reward", reward_of("sums/1/9/9", 1.0))
    await until(lambda: len(service._held["training", 1]) == 9, "it is held: no checkpoint covers its step yet")
    assert set(service._collectors) <= {("training", 2)}
    await stages.publish("generator", *samples_of(2))
    await stages.publish("reward", *rewards_of(samples_of(2)))
    await until(lambda: stages.has_read("trainer"), "all of both steps is acknowledged")
    assert stages.recorder.checkpoints == [2]
    await stages.publish("reward", reward_of("sums/1/9/8", 1.0))
    await until(lambda: stages.has_read("trainer"), "of a step that a checkpoint covers, at once")
    await ends(task, service)


@FEW
@given(
    rewards=st.lists(st.sampled_from([0.0, 1.0, None]), min_size=20, max_size=20),
    seed=st.integers(0, 99),
    max_demands=st.integers(0, 3),
)
def test_rewards_alone_decide_the_choice_of_groups(rewards: list[float | None], seed: int, max_demands: int) -> None:
    """Demands are answered with the next prompts; None is a failed reward, which is dropped."""

    def chosen(order: random.Random | None) -> Any:
        size = {"num_prompts": 2, "samples_per_prompt": 2, "max_demands": max_demands}
        collector, asked, demands = Collector(StepShape(job="sums", step=1, stages=("reward",), **size)), range(2), []
        while True:
            records = [example_sample(prompt, replica) for prompt in asked for replica in range(2)]
            scores = [_score(s, rewards[s.prompt * 2 + s.replica]) for s in records]
            arriving: list[Any] = [*records, *scores, *records[:1]]
            if order is not None:
                order.shuffle(arriving)
            for record in arriving:
                collector.add_sample(record) if isinstance(record, Sample) else collector.add_score(record)
            if (demand := collector.demand()) is None:
                break
            demands.append(demand)
            asked = range(2 * demand.round, 2 * demand.round + demand.num_prompts)  # as `Order.places` has it
        try:
            return demands, collector.chosen()
        except RolloutError as error:
            return demands, str(error)

    demands, result = chosen(None)
    assert chosen(random.Random(seed)) == (demands, result)
    assert len(demands) <= max_demands
    if isinstance(result, str):
        assert "all were dropped" in result
        assert "the first, sums/1/0/0: no digits" in result
        return
    groups = [[s for s in result.samples if s.prompt == prompt] for prompt in {s.prompt for s in result.samples}]
    assert 1 <= len(groups) <= 2
    informative = [len({result.rewards[s.id].values for s in group}) > 1 for group in groups]
    if max_demands and any(informative):
        assert all(informative)
    assert len(result.samples) + result.num_dropped == len(result.all_samples)


def _score(sample: Sample, reward: float | None) -> Score:
    return reward_of(sample.id, 0.0, error="no digits") if reward is None else reward_of(sample.id, reward)


@pytest.mark.parametrize("staleness", [0, 2])
def test_two_hundred_steps_leave_no_records_or_threads(staleness: int) -> None:
    job = a_job(training={"steps": 200, "promptsPerStep": 2, "maxStaleness": staleness})
    threads = set(threading.enumerate())

    async def main() -> None:
        stages = await Stages.open(job, SystemClock(), prompts=1, generator=2, reward=2, trainer=1)
        sources = FakeSources()
        services = [stages.prompts(), stages.generator(0), stages.generator(1), stages.reward(sources)]
        services += [stages.reward(sources, 1), stages.trainer(), DeadLetterWatch(stages.bus, stages.vitals)]
        await Supervisor(stages.vitals, stall_seconds=20.0).run(services, asyncio.Event())
        assert [trained.step for trained in stages.recorder.trained] == list(range(1, 201))
        samples = [sample for trained in stages.recorder.trained for sample in trained.chosen.samples]
        lags = {sample.step - 1 - version for sample in samples for version in sample.weights_versions}
        assert lags <= set(range(staleness + 1))
        assert not staleness or max(lags) > 0, "generation runs ahead of training"
        assert not stages.stored(), "every record was acknowledged by all who read it"
        await asyncio.sleep(0.01)  # cancelled ones take a round of the loop
        assert len(asyncio.all_tasks()) == 1
        await stages.transport.close()

    asyncio.run(main())
    for thread in {*threading.enumerate()} - threads:
        thread.join(10.0)
    assert {*threading.enumerate()} <= threads  # those of other tests may end meanwhile


async def test_a_reward_that_fails_ends_the_loop_with_its_name() -> None:
    class Failing(FakeSources):
        async def score_many(self, samples: Any, *_: Any) -> list[Score]:
            raise ValueError('{"no": "digits"}')

    stages = await Stages.open(a_job(), SystemClock(), prompts=1, generator=1, reward=1, trainer=1)
    services = [stages.prompts(), stages.generator(), stages.reward(Failing()), stages.trainer()]
    with pytest.raises(StageFailed, match="digits"):
        await Supervisor(stages.vitals, stall_seconds=20.0).run(services, asyncio.Event())

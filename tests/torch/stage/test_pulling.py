"""Prompts are pulled late, returned at once on leaving, and ordered only for speed. Time passes only on request."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from coroutines import until
from example_records import example_sample
from hypothesis import given, settings, strategies as st
from small_job import a_job
from stages import FakeEngine, FakeSources, Stages, ends, prompts_for

from rlhfspec.critic.service import CriticService
from rlhfspec.engine.base import EngineStep
from rlhfspec.errors import InvalidRequest, NumericalError, WeightsVersionError
from rlhfspec.messages.loop import workers_of
from rlhfspec.messages.records import DatasetInfo, Prompt, Sample, Score
from rlhfspec.messages.transport.clock import FakeClock, SystemClock
from rlhfspec.prompts.lengths import PromptLengths
from rlhfspec.prompts.service import PromptsService, prompts_of
from rlhfspec.stage.scoring import _MOST_TOKENS, TokenScoringService, _num_together
from rlhfspec.stage.supervisor import Supervisor

NUM_PROMPTS = 20


class LongEngine(FakeEngine):
    def __init__(self, rows: int) -> None:
        super().__init__(random.Random(0))
        self.rows = rows
        self.goes_on = False

    def step(self) -> EngineStep:
        if self.goes_on:
            return super().step()
        return EngineStep(
            gains=(), finished=(), num_decoding=1, num_prefill_tokens=0, num_verified_nodes=1, num_committed=1,
            strategy="off", seconds=0.001,
        )  # fmt: skip


def prompts_in(stages: Stages, num_prompts: int = NUM_PROMPTS) -> list[Prompt]:
    return prompts_of(stages.job.model_copy(deep=True), prompts_for(stages.job), 1, 0, None)[:num_prompts]


PLAIN_GRPO = {"name": "grpo", "klCoefficient": 0.0}


def a_big_job(prefetch: int) -> Any:
    algorithm, roles = {"samplesPerPrompt": 4} | PLAIN_GRPO, {"generator": {"prefetch": prefetch}}
    return a_job(algorithm=algorithm, training={"steps": 1, "promptsPerStep": 5}, roles=roles)


@pytest.mark.parametrize("prefetch", [0, 3, 4])
async def test_a_generator_holds_its_rows_and_its_look_ahead_and_no_more(prefetch: int) -> None:
    stages = await Stages.open(a_big_job(prefetch), prompts=1, generator=2, trainer=1)
    await stages.publish("prompts", *prompts_in(stages))
    first, second = LongEngine(8), LongEngine(64)
    services = [stages.generator(0, first), stages.generator(1, second)]
    tasks = [asyncio.create_task(services[0].run())]
    at_least = 8 + prefetch - max(prefetch, 1) + 1  # it asks for a whole piece or for none
    await until(lambda: len(first.submitted) >= at_least, "its rows and its look-ahead are full")
    await asyncio.sleep(0.1)  # two bursts
    assert at_least <= len(first.submitted) <= 8 + prefetch
    tasks.append(asyncio.create_task(services[1].run()))
    await until(lambda: len(first.submitted) + len(second.submitted) == NUM_PROMPTS, "the other takes the rest")
    assert len(first.submitted) <= 8 + prefetch
    for task, service in zip(tasks, services, strict=True):
        await ends(task, service)


@pytest.mark.parametrize(
    ("workers", "mode", "samples_per_prompt", "given", "prefetch", "pulled"),
    [
        (1, "auto", 16, None, 4, 4),
        (2, "off", 16, None, 4, 4),
        (2, "auto", 16, None, 16, 16),
        (2, "auto", 3, None, 4, 3),
        (2, "auto", 16, 6, 6, 6),
        (2, "auto", 16, 0, 0, 1),
        ({"min": 1, "max": 3}, "auto", 8, None, 8, 8),
    ],
)
def test_whole_groups_are_pulled_where_samples_move(
    workers: Any, mode: str, samples_per_prompt: int, given: int | None, prefetch: int, pulled: int
) -> None:
    count = {"replicas": workers} if isinstance(workers, dict) else {"workers": workers}
    algorithm = {"name": "grpo", "samplesPerPrompt": samples_per_prompt}
    job = a_job(algorithm=algorithm, rebalance={"mode": mode}, roles={"generator": {"prefetch": given, **count}})
    assert (job.spec.prefetch, job.spec.pulled_at_a_time) == (prefetch, pulled)
    assert ("rebalancer" in workers_of(job)) == job.spec.moves_samples


async def test_a_generator_whose_samples_may_move_takes_whole_groups() -> None:
    algorithm, roles = {"samplesPerPrompt": 5} | PLAIN_GRPO, {"generator": {"workers": 2}}
    job = a_job(algorithm=algorithm, training={"steps": 1, "promptsPerStep": 6}, roles=roles)
    stages = await Stages.open(job, prompts=1, generator=2, trainer=1)
    first, second = LongEngine(7), LongEngine(64)
    services = [stages.generator(0, first), stages.generator(1, second)]
    await stages.publish("prompts", *prompts_in(stages, 30))
    tasks = [asyncio.create_task(services[0].run())]
    await until(lambda: len(first.submitted) >= 10, "two groups: as long as one more has room")
    tasks.append(asyncio.create_task(services[1].run()))
    await until(lambda: len(first.submitted) + len(second.submitted) == 30, "the other takes the rest")
    of_groups = [{sample.rpartition("/")[0] for sample in engine.submitted} for engine in (first, second)]
    assert not of_groups[0] & of_groups[1]
    for task, service in zip(tasks, services, strict=True):
        await ends(task, service)


async def test_prompts_of_a_stopped_generator_go_to_another_at_once() -> None:
    stages = await Stages.open(a_big_job(4), prompts=1, generator=2, trainer=1)
    await stages.publish("prompts", *prompts_in(stages))
    leaving, staying = LongEngine(64), LongEngine(64)
    first, second = stages.generator(0, leaving), stages.generator(1, staying)
    task = asyncio.create_task(first.run())
    await until(lambda: len(leaving.submitted) == NUM_PROMPTS, "it has them all")
    other = asyncio.create_task(second.run())
    await ends(task, first)
    await until(lambda: len(staying.submitted) == NUM_PROMPTS, "the other has them all")
    staying.goes_on = True
    await until(lambda: "prompt" not in stages.stored(), "all are answered")
    await ends(other, second)


async def test_prompts_that_wait_for_weights_are_handed_back_too() -> None:
    stages = await Stages.open(a_big_job(4), prompts=1, generator=1, trainer=1)
    await stages.publish("prompts", *[replace(prompt, weights_version=1) for prompt in prompts_in(stages, 3)])
    service = stages.generator(0, LongEngine(8))
    task = asyncio.create_task(service.run())
    await until(lambda: service.vitals.state().what == "weights version 1", "it says what it waits for")
    await ends(task, service)
    inbox = await stages.bus.of("generator").subscribe(Prompt)
    assert len(await inbox.pull(max_records=9, timeout_seconds=0.0)) == 3


class AbsentWeights:
    def __init__(self, store: Any) -> None:
        self.store, self.is_there, self.num_asked = store, False, 0

    def get(self, record: Any) -> Any:
        self.num_asked += 1
        if not self.is_there:
            raise WeightsVersionError(record.version, 0, f"{record.uri} is not kept")
        return self.store.get(record)


class Values:
    version = 0

    def load_weights(self, state: Any, *, version: int) -> None:
        self.version = version

    at_once = 1

    def values_of(self, pairs: Any) -> list[list[float]]:
        return [[0.0] * len(response) for _, response in pairs]


def _generator_of(stages: Stages, absent: Any) -> Any:
    stages.weights = absent
    return stages.generator(0, LongEngine(8))


def _critic_of(stages: Stages, absent: Any) -> Any:
    scorer: Any = Values()
    return CriticService(0, stages.vitals, stages.bus.of("critic"), job=stages.job, scorer=scorer, weights=absent)


@pytest.mark.parametrize(("role", "make"), [("policy", _generator_of), ("critic", _critic_of)])
@pytest.mark.parametrize("comes", [True, False])
async def test_weights_not_there_yet_are_requested_again(role: Any, make: Callable[..., Any], comes: bool) -> None:
    clock = FakeClock()
    stages = await Stages.open(a_job(), clock, prompts=1, generator=1, critic=1, trainer=1)
    absent = AbsentWeights(stages.weights)
    record = stages.weights.put("sums", role, 1, {"w": torch.tensor([1.0])})
    service = make(stages, absent)
    task = asyncio.create_task(service.run())
    await stages.publish("generator", example_sample(0, 0, step=2))  # of which the critic needs version 1
    await stages.publish("trainer", record)
    await until(lambda: absent.num_asked == 1, "it asks")
    for asked in range(2, 5):
        await clock.advance(0.3)
        await until(lambda asked=asked: absent.num_asked == asked, "it asks again")
    state = service.vitals.state()
    assert (state.doing, state.what) == ("working", "loading weights version 1"), "it has a deadline and a name"
    if comes:
        absent.is_there = True
        await clock.advance(0.3)
        loaded = service._engine if role == "policy" else service._scorer
        name = "weights_version" if role == "policy" else "version"
        await until(lambda: getattr(loaded, name) == 1, "it has them")
    await ends(task, service)


class NeverDone(FakeSources):
    async def score_many(self, samples: Any, *_: Any) -> list[Score]:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("grouping", ["sample", "group"])
async def test_samples_of_a_stopped_reward_go_to_another_at_once(grouping: Any) -> None:
    stages = await Stages.open(a_job(), generator=1, reward=2, trainer=1)
    first, second = stages.reward(NeverDone(grouping)), stages.reward(FakeSources(grouping), 1)
    task = asyncio.create_task(first.run())
    samples = [example_sample(prompt, replica) for prompt in range(3) for replica in range(2)]
    await stages.publish("generator", *samples[:5])  # the last group is not whole
    await until(lambda: len(first._held) == 5, "it has them")
    await ends(task, first)
    other = asyncio.create_task(second.run())
    await stages.publish("generator", samples[5])
    await until(lambda: "reward" not in str(_owed(stages)), "the other has scored them all")
    await ends(other, second)


def _owed(stages: Stages) -> list[list[str]]:
    return [list(m.owed) for m in stages.transport._subjects[stages.bus.subject(Sample)].stored.values()]  # type: ignore[union-attr]


class Unprepared(TokenScoringService):
    async def prepare(self, sample: Sample) -> bool:
        await self.stopping.wait()
        return False

    def score(self, samples: Sequence[Sample]) -> list[list[float]]:
        raise AssertionError("what it needs never came")


async def test_a_sample_held_by_a_stopped_scorer_is_handed_back() -> None:
    stages = await Stages.open(a_job(), generator=1, critic=1, trainer=1)
    service = Unprepared("critic", 0, stages.vitals, stages.bus.of("critic"), deadline_seconds=9.0)
    task = asyncio.create_task(service.run())
    await stages.publish("generator", example_sample(0, 0))
    await asyncio.sleep(0.02)
    await ends(task, service)
    inbox = await stages.bus.of("critic").subscribe(Sample)
    assert len(await inbox.pull(max_records=9, timeout_seconds=0.0)) == 1


class Together(TokenScoringService):
    def __init__(self, stages: Stages) -> None:
        super().__init__("critic", 0, stages.vitals, stages.bus.of("critic"), deadline_seconds=9.0, at_once=4)
        self.together: list[list[str]] = []

    def score(self, samples: Sequence[Sample]) -> list[list[float] | Exception]:
        self.together.append([sample.id for sample in samples])
        return [NumericalError("nan") if sample.prompt == 9 else [0.5] * len(sample.token_ids) for sample in samples]


async def test_samples_of_a_step_are_scored_together_and_what_is_wrong_with_one_is_its_own() -> None:
    stages = await Stages.open(a_job(), generator=1, critic=1, trainer=1)
    service = Together(stages)
    samples = [example_sample(number, 0, step=1 + number // 3) for number in range(5)]
    await stages.publish("generator", replace(samples[1], finish_reason="error"), *samples[2:5], samples[0])
    scores = await stages.bus.of("trainer").subscribe(Score)
    task = asyncio.create_task(service.run())
    await until(lambda: "critic" not in str(_owed(stages)), "all are scored")
    await stages.publish("generator", example_sample(9, 0, step=4), example_sample(8, 0, step=4))
    with pytest.raises(NumericalError):
        await task
    found = [each.record for each in await scores.pull(max_records=99, timeout_seconds=0.0)]
    assert all(score.values for score in found)
    of_steps = [["sums/1/2/0"], ["sums/2/3/0", "sums/2/4/0"], ["sums/1/0/0"], ["sums/4/9/0", "sums/4/8/0"]]
    assert service.together == of_steps
    assert [each.sample_id for each in found] == [*of_steps[0], *of_steps[1], *of_steps[2], "sums/4/8/0"]
    assert str(_owed(stages)).count("critic") == 1, "the one without a number comes again"


def test_a_redelivered_sample_is_scored_alone() -> None:
    """The sample may have killed its worker."""
    record = example_sample(0, 0)

    def delivered(*times: int) -> Any:
        return [SimpleNamespace(record=record, num_deliveries=number) for number in times]

    assert [_num_together(delivered(*times)) for times in ((1, 1, 1), (2, 1), (1, 1, 2), (2, 2))] == [3, 1, 2, 1]
    long = replace(record, token_ids=tuple(range(_MOST_TOKENS // 2)))
    assert _num_together([SimpleNamespace(record=long, num_deliveries=1)] * 3) == 1  # type: ignore[list-item]


class WantsAnswers(FakeSources):
    def check_columns(self, columns: Any) -> None:
        if "answer" not in columns:
            raise InvalidRequest("spec.rewards.sources[0].function", "exact", "asks for answer")


def test_a_reward_checks_the_datas_columns_before_it_scores() -> None:
    """The columns come from the process that reads the data."""

    async def main(columns: dict[str, str]) -> list[list[str]]:
        stages = await Stages.open(a_job(), generator=1, reward=1, trainer=1, prompts=1)
        info = DatasetInfo(id="sums/columns", job="sums", num_prompts=5, num_held_out=3, last_step=0, columns=columns)
        await stages.publish("prompts", info)
        sources = WantsAnswers()
        service = stages.reward(sources)
        await stages.publish("generator", example_sample(0, 0))
        task = asyncio.create_task(service.run())
        await until(lambda: sources.calls or task.done(), "it scores or refuses")
        await ends(task, service)
        return sources.calls

    assert asyncio.run(main({"answer": ""})) == [["sums/1/0/0"]]
    with pytest.raises(InvalidRequest, match="asks for answer"):
        asyncio.run(main({"question": ""}))


def test_prompts_with_long_answers_go_first_and_replicas_stay_together() -> None:
    job = a_job(training={"steps": 3, "promptsPerStep": 5})
    prompts = prompts_of(job, prompts_for(job), 1, 0, None)
    lengths = PromptLengths()
    assert lengths.longest_first(prompts) == prompts, "equally long prompts of which nothing is known"
    for prompt in prompts:
        if prompt.prompt != 3:  # never seen: between those
            lengths.add_length(prompt.token_ids, 10 * prompt.prompt)
    assert [(p.prompt, p.replica) for p in lengths.longest_first(prompts)] == [
        (place, replica) for place in (4, 2, 3, 1, 0) for replica in range(2)
    ]


@settings(max_examples=10)
@given(order=st.randoms(use_true_random=False), rows=st.integers(1, 9), prefetch=st.integers(0, 9))
def test_order_and_look_ahead_do_not_change_what_is_trained(order: Any, rows: int, prefetch: int) -> None:
    def trained(shuffled: bool) -> list[Any]:
        job = a_job(roles={"generator": {"prefetch": prefetch if shuffled else 4}})

        async def main() -> list[Any]:
            stages = await Stages.open(job, SystemClock(), prompts=1, generator=2, reward=1, trainer=1)
            services: list[Any] = [stages.prompts(), *(stages.generator(worker) for worker in range(2))]
            services += [stages.reward(FakeSources()), stages.trainer()]
            if shuffled:
                services[0]._lengths = Shuffled(order)
                for engine in stages.engines:
                    engine.rows = rows
            await Supervisor(stages.vitals, stall_seconds=20.0).run(services, asyncio.Event())
            return [(rollouts.ids, rollouts.token_ids.tolist()) for rollouts in stages.learner.learnt]

        return asyncio.run(main())

    assert trained(shuffled=True) == trained(shuffled=False)


class Shuffled(PromptLengths):
    def __init__(self, order: random.Random) -> None:
        super().__init__()
        self._order = order

    def longest_first(self, prompts: Any) -> list[Prompt]:
        prompts = list(prompts)
        self._order.shuffle(prompts)
        return prompts


@pytest.mark.parametrize(("steps", "watches"), [(2, False), (3, True)])
async def test_the_prompts_stage_learns_lengths_only_if_prompts_repeat(steps: int, watches: bool) -> None:
    job = a_job(training={"steps": steps, "promptsPerStep": 2})

    stages = await Stages.open(job, prompts=1, generator=1, trainer=1)
    service: PromptsService = stages.prompts()
    task = asyncio.create_task(service.run())
    await until(lambda: service.vitals.state().what == "weights for step 1", "it runs")
    sample = example_sample(0, 0)
    await stages.publish("generator", sample)
    if watches:
        await until(lambda: service._lengths.work(sample.prompt_token_ids) > len(sample.prompt_token_ids), "learnt")
    assert [name for name in stages.stored() if name == "sample"] == ["sample"], "it is kept for the trainer"
    assert all(list(owed) == ["trainer"] for owed in _owed(stages)), "and for nobody else"
    await ends(task, service)
    assert watches == (len(service._lengths._means) == 1)

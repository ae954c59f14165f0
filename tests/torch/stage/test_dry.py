"""A dry generator scores for another stage until there are prompts again."""

import asyncio
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from coroutines import until
from example_records import example_sample
from small_job import JOB, a_job
from stages import FakeEngine, Stages, a_prompt, ends

from rlhfspec.engine.base import EngineStep
from rlhfspec.errors import InvalidRequest
from rlhfspec.job import RLHFJob
from rlhfspec.messages.loop import workers_of
from rlhfspec.messages.records import Plan, Sample, Score
from rlhfspec.messages.transport.memory import MemoryTransport
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.context import Context, Run
from rlhfspec.stage.guest import HostedScoring, HostedVitals
from rlhfspec.stage.scoring import TokenScoringService
from rlhfspec.stage.vitals import Vitals
from rlhfspec.training.weights import MemoryWeightStore
from rlhfspec.worker.worker import guest_of

WORKERS = {"prompts": 1, "generator": 2, "reference": 1, "trainer": 1, "rebalancer": 1}


def a_plan(**dry: str) -> Plan:
    return Plan(id=f"{JOB}/plan", job=JOB, dry={int(name[1:]): what for name, what in dry.items()})


class Scorer(TokenScoringService):
    def __init__(self, worker: int, vitals: Any, bus: Any) -> None:
        super().__init__("reference", worker, vitals, bus, deadline_seconds=60.0)
        self.may_go_on = threading.Event()
        self.is_at: list[str] = []
        self.scored: list[str] = []

    def score(self, samples: Sequence[Sample]) -> list[list[float]]:
        [sample] = samples
        self.is_at.append(sample.id)
        assert self.may_go_on.wait(30.0)
        self.is_at.remove(sample.id)
        self.scored.append(sample.id)
        return [[0.5] * len(sample.token_ids)]


class Engine(FakeEngine):
    def __init__(self, scorer: Scorer | None = None) -> None:
        super().__init__(random.Random(0))
        self.scorer = scorer

    def step(self) -> EngineStep:
        assert self.scorer is None or not self.scorer.is_at, "one device: either generates or scores"
        return super().step()


async def reads_plans(stages: Stages) -> None:
    """Subscribe to plans, as those without a reader would be lost."""
    plans = stages.transport._subjects[stages.bus.subject(Plan)]
    await until(lambda: plans.watchers, "it reads plans")


class Place:
    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        bus = Bus(stages.transport, JOB, uid=stages.bus.uid, workers=WORKERS | {"reference": 3}, clock=stages.clock)
        self.scorer = Scorer(2, HostedVitals(stages.vitals, "generator", 1), bus.of("reference", 2))
        self.loaded = asyncio.Event()
        self.loaded.set()
        self.num_made = 0
        self.engine: Any = Engine(self.scorer)
        self.service = stages.generator(1, self.engine, hosted_scoring=HostedScoring("reference", self._make))
        self.task = asyncio.create_task(self.service.run())

    @classmethod
    async def open(cls) -> "Place":
        place = cls(await Stages.open(a_job(algorithm={"klCoefficient": 0.1}), **WORKERS))
        await reads_plans(place.stages)
        return place

    async def _make(self) -> TokenScoringService:
        self.num_made += 1
        await self.loaded.wait()
        return self.scorer

    async def told(self, **dry: str) -> None:
        await self.stages.publish("rebalancer", a_plan(**dry))

    async def samples(self, *numbers: int) -> list[str]:
        made = [example_sample(number, 0, step=2) for number in numbers]
        await self.stages.publish("generator", *made)
        return [sample.id for sample in made]

    async def prompts(self, *numbers: int) -> list[str]:
        made = [a_prompt(number) for number in numbers]
        await self.stages.publish("prompts", *made)
        return [prompt.id for prompt in made]

    async def scores_in_the_middle_of(self, sample: str) -> None:
        await until(lambda: self.scorer.is_at == [sample], f"it is at {sample}")

    async def ended(self) -> None:
        await self.service.stop()
        if self.scorer.is_at:
            await until(self.scorer.stopping.is_set, "it is to end with this sample")
        self.scorer.may_go_on.set()
        await ends(self.task, self.service)


async def test_prompts_wait_only_for_the_sample_being_scored() -> None:
    place = await Place.open()
    await place.told(g0="score")
    first, second = await place.samples(0, 1)
    await asyncio.sleep(0.02)
    assert not place.num_made, "the plan spoke of another"
    await place.told(g1="score")
    await place.scores_in_the_middle_of(first)
    [state] = [state for state in place.stages.vitals.snapshot() if state.stage == "generator"]
    assert (state.doing, state.what) == ("working", f"scoring {first}")
    assert {state.stage for state in place.stages.vitals.snapshot()} == {"generator"}, "nobody sees a worker of it"
    prompts = await place.prompts(0, 1)
    await asyncio.sleep(0.02)
    assert not place.engine.submitted
    await place.told(g1="wait")  # else it goes on with the second when it is dry again
    place.scorer.may_go_on.set()
    await until(lambda: len(place.engine.submitted) == 2, "prompts are generated")
    assert place.engine.submitted == prompts
    assert place.scorer.scored == [first]
    other = await place.stages.bus.of("reference").subscribe(Sample)
    deliveries = await other.pull(max_records=8, timeout_seconds=0.0)
    there = {delivery.record.id for delivery in deliveries}
    assert there - set(prompts) == {second}, "given back at once: no time has passed"
    for delivery in deliveries:
        await delivery.ack()
    await place.ended()


async def test_a_dry_generator_scores_repeatedly_and_loads_once() -> None:
    place = await Place.open()
    place.scorer.may_go_on.set()
    await place.told(g1="score")
    for number in range(3):
        [sample] = await place.samples(number)
        await until(lambda sample=sample: sample in place.scorer.scored, "it scores")
        [prompt] = await place.prompts(number)
        await until(lambda prompt=prompt: prompt in place.scorer.scored, "it generates, and scores its own too")
    scores = await place.stages.bus.of("trainer").subscribe(Score)
    ids: list[str] = []
    while len(ids) < 6:  # a score is on its way for a moment
        ids += [delivery.record.id for delivery in await scores.pull(max_records=8, timeout_seconds=10.0)]
    assert ids == [f"{sample}/reference" for sample in place.scorer.scored]
    assert place.num_made == 1
    await place.told(g0="score")
    await asyncio.sleep(0.02)
    await place.samples(9)
    await asyncio.sleep(0.02)
    assert len(place.scorer.scored) == 6, "the plan says otherwise"
    await place.ended()


async def test_a_stopped_dry_generator_finishes_its_sample_and_takes_no_other() -> None:
    place = await Place.open()
    first, second = await place.samples(0, 1)
    await place.told(g1="score")
    await place.scores_in_the_middle_of(first)
    await place.ended()
    assert place.scorer.scored == [first]
    assert place.stages.stored()["sample"] == [f"{place.stages.bus.uid}/{id}" for id in (first, second)]
    assert not place.stages.has_read("reference"), "the second is another's"


async def test_the_sample_of_a_dead_dry_generator_goes_to_another_scorer() -> None:
    place = await Place.open()
    [sample] = await place.samples(0)
    await place.told(g1="score")
    await place.scores_in_the_middle_of(sample)
    place.task.cancel()
    await asyncio.gather(place.task, return_exceptions=True)
    await place.stages.redeliver(Sample, "reference")
    other = await place.stages.bus.of("reference").subscribe(Sample)
    [delivery] = await other.pull(max_records=8, timeout_seconds=0.0)
    assert (delivery.record.id, delivery.num_deliveries) == (sample, 2)
    place.scorer.may_go_on.set()


async def test_nothing_is_generated_while_it_loads() -> None:
    """Loading changes settings of the whole process."""

    place = await Place.open()
    place.loaded.clear()
    await place.told(g1="score")
    await until(lambda: place.num_made, "it loads")
    [prompt] = await place.prompts(0)
    await asyncio.sleep(0.02)
    assert not place.engine.submitted
    place.loaded.set()
    await until(lambda: prompt in place.engine.submitted, "it generates")
    await place.ended()


async def test_a_dry_generator_that_cannot_score_logs_it_once_and_waits(caplog: pytest.LogCaptureFixture) -> None:
    async def make() -> TokenScoringService:
        raise InvalidRequest("credentials", "/run/c", "no usable certificate of reference is there")

    stages = await Stages.open(a_job(), **WORKERS)
    engine: Any = Engine()
    service = stages.generator(1, engine, hosted_scoring=HostedScoring("reference", make))
    task = asyncio.create_task(service.run())
    await reads_plans(stages)
    await stages.publish("rebalancer", a_plan(g1="score"))
    for number in range(3):
        await until(lambda: caplog.records, "it says why")
        await stages.publish("prompts", a_prompt(number))
        await until(lambda number=number: len(engine.submitted) == number + 1, "it generates")
    await ends(task, service)
    [record] = caplog.records
    assert "cannot help reference" in record.getMessage()
    assert "no usable certificate of reference" in record.getMessage()


@pytest.mark.parametrize("dry", [{}, {1: ""}, {1: "scores"}, {1: "wait"}, {0: "score"}, {1 << 63: "score"}])
async def test_an_invalid_plan_for_dry_generators_is_ignored(dry: dict[int, str]) -> None:
    place = await Place.open()
    await place.stages.publish("rebalancer", Plan(id=f"{JOB}/plan", job=JOB, dry=dry))
    await place.samples(0)
    await asyncio.sleep(0.02)
    assert not place.num_made
    await place.ended()


JOBS: list[tuple[dict[str, Any], str | None]] = [
    ({"algorithm": {"name": "grpo", "klCoefficient": 0.1}}, "reference"),
    ({"algorithm": {"name": "ppo", "samplesPerPrompt": 2, "klCoefficient": 0.1}}, "reference"),
    ({"algorithm": {"name": "ppo", "samplesPerPrompt": 2, "klCoefficient": 0.0}}, "critic"),
    ({}, None),
]


@pytest.mark.parametrize(("spec", "helped"), JOBS)
def test_generators_host_scoring_only_where_the_job_needs_it(spec: dict[str, Any], helped: str | None) -> None:
    assert_guests(a_job(roles={"generator": {"workers": 2}}, **spec), {"generator": helped, "trainer": None})
    assert_guests(a_job(**spec), {"generator": None})


def assert_guests(job: RLHFJob, wanted: dict[str, str | None]) -> None:
    async def connect(stage: str, worker: int) -> Bus:
        raise AssertionError("nothing is opened before a plan says so")

    bus = Bus(MemoryTransport(), JOB, uid="run", workers=workers_of(job))
    for stage, helped in wanted.items():
        context = Context(
            worker=0, bus=bus.of(stage), weights=MemoryWeightStore(keep=1), vitals=Vitals(),
            run=Run(uid="run", base_folder=Path(), folder=Path()), say=print,
        )  # fmt: skip
        guest = guest_of(job, context, connect)
        assert (guest and guest.stage) == helped

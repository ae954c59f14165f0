"""The advised number of generators settles, never oscillates, and is right by the simulator."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loads import a_load, sample_of
from small_job import JOB

from rlhfspec.job import RLHFJob
from rlhfspec.messages.loop import workers_of
from rlhfspec.moves.rebalancing.elastic import (
    COOLDOWN_SECONDS,
    FEWER_SHARE,
    LONG_STAGE_SECONDS,
    MORE_SHARE,
    Elastic,
    StageOutlook,
    Wanted,
    worth,
)
from rlhfspec.moves.rebalancing.fleet import Fleet
from rlhfspec.rebalancer.knowledge import FleetKnowledge, StageWork
from rlhfspec.rebalancer.service import elastic_of, work_of
from rlhfspec.runs.folder.run_folder import example_job
from rlhfspec.simulator.simulator import PRESETS, Scenario, simulate, workload
from rlhfspec.trainer.collector import example_sample

LEAST, MOST = 1, 16

positive = st.floats(1e-4, 1.0)
outlooks = st.builds(
    StageOutlook,
    step_seconds=positive,
    sequence_seconds=positive,
    tokens=st.floats(1.0, 1e6),
    longest=st.floats(1.0, 1e4),
    rows=st.integers(1, 512),
    prefill_seconds=st.floats(0.0, 100.0),
)


class Trial:
    def __init__(self, begins_with: int = 1, **bounds: int) -> None:
        self.elastic = Elastic(**({"least": LEAST, "most": MOST} | bounds))
        self.number, self.now, self.stage = begins_with, 0.0, 0
        self.history: list[int] = []

    def go_through(self, outlook: StageOutlook, *, seconds: float = COOLDOWN_SECONDS) -> Wanted | None:
        self.stage += 1
        half = replace(outlook, tokens=outlook.tokens / 9, longest=outlook.longest / 2)
        wanted = None
        for each in (outlook, half):  # nearly done: that says nothing of the next
            wanted = self.elastic.learn(self.stage, each, self.now, num_generators=self.number)
        self.now += seconds
        if wanted is not None:
            self.number = wanted.number
        self.history.append(self.number)
        return wanted

    @property
    def num_reversals(self) -> int:
        changes = [later - earlier for earlier, later in pairwise(self.history) if later != earlier]
        return sum((one > 0) != (other > 0) for one, other in pairwise(changes))


@given(outlooks, st.integers(1, 16))
def test_no_work_asks_for_more_and_for_fewer(outlook: StageOutlook, number: int) -> None:
    better = worth(outlook, number, least=LEAST, most=MOST)
    assert worth(outlook, better, least=LEAST, most=MOST) <= better, "the rest of what pays is asked for at once"
    if better > number:
        assert outlook.seconds(better) <= (1 - MORE_SHARE) * outlook.seconds(better - 1)
        assert worth(outlook, better, least=LEAST, most=MOST) == better
    if better < number:
        assert outlook.seconds(better) < (1 + FEWER_SHARE) * outlook.seconds(number)


@given(outlooks, st.integers(1, 16))
def test_the_same_work_again_and_again_settles_and_moves_one_way(outlook: StageOutlook, begins_with: int) -> None:
    trial = Trial(begins_with)
    for _ in range(4 * MOST + 8):
        trial.go_through(outlook)
    assert trial.num_reversals == 0
    assert len(set(trial.history[-4:])) == 1
    settled = trial.number
    assert worth(outlook, settled, least=LEAST, most=MOST) == settled


@settings(max_examples=30)
@given(outlooks, st.integers(0, 1 << 30), st.floats(1.0, 8.0))
def test_whatever_comes_it_swings_ever_more_seldom(outlook: StageOutlook, seed: int, spread: float) -> None:
    random, trial, num_stages = np.random.default_rng(seed), Trial(), 600
    for _ in range(num_stages):
        tokens, longest = np.exp(random.uniform(-math.log(spread), math.log(spread), 2))
        scaled = {"tokens": outlook.tokens * tokens, "longest": outlook.longest * longest}
        trial.go_through(replace(outlook, **scaled))
    assert trial.num_reversals <= 2 * math.log2(num_stages)
    assert len(set(trial.history[-num_stages // 4 :])) <= 3


def usual(tokens: float = 12_800.0) -> StageOutlook:
    return StageOutlook(step_seconds=0.01, sequence_seconds=0.001, tokens=tokens, longest=200.0, rows=16)


def test_it_waits_for_two_stages_and_for_the_cooldown() -> None:
    trial = Trial()
    assert trial.go_through(usual(), seconds=1.0) is None, "begun in the middle of it"
    assert trial.go_through(usual(), seconds=1.0) is None
    assert trial.go_through(usual(), seconds=1.0) is None
    wanted = trial.go_through(usual(), seconds=1.0)
    assert wanted is not None
    assert (wanted.number, wanted.because) == (4, "a stage takes 20.8 s with 1 and 5.2 s with 4")
    for _ in range(20):
        assert trial.go_through(usual(200.0), seconds=1.0) == wanted, "it has only just changed"
    fewer = [trial.go_through(usual(200.0)) for _ in range(12)]
    assert fewer[-1] is not None
    assert fewer[-1].number == 1


def test_the_number_is_kept_within_its_bounds() -> None:
    for begins_with in (1, 9):
        trial = Trial(begins_with, least=2, most=3)
        for tokens in (12_800.0, 100.0):
            for _ in range(20):
                wanted = trial.go_through(usual(tokens))
        assert wanted is not None
        assert set(trial.history[5:]) == {2, 3}


def test_fewer_that_were_too_few_are_believed_later() -> None:
    trial, lasted = Trial(), []
    for _ in range(4):
        while trial.number < 4:
            trial.go_through(usual())
        before = len(trial.history)
        while trial.number == 4:
            trial.go_through(usual(200.0))
        lasted.append(len(trial.history) - before)
    assert all(later > 1.5 * earlier for earlier, later in pairwise(lasted)), lasted


def test_a_long_stage_asks_for_more_before_it_ends_and_its_end_asks_for_nothing() -> None:
    elastic, long = Elastic(least=1, most=4), usual(400_000.0)
    assert elastic.learn(1, long, 0.0, num_generators=1) is None
    assert elastic.learn(1, long, LONG_STAGE_SECONDS - 1, num_generators=1) is None
    assert elastic.learn(1, long, LONG_STAGE_SECONDS, num_generators=1) == Wanted(
        4, "a stage takes 650.0 s with 1 and 162.5 s with 4"
    )
    for second in range(1000):
        wanted = elastic.learn(1, usual(10.0), LONG_STAGE_SECONDS + second, num_generators=4)
        assert wanted is not None
        assert wanted.number == 4


@pytest.mark.parametrize("curve", ["plain", "t0=32c", "t0=2.5c", "memory-bound"])
def test_by_the_simulator_it_settles_where_one_more_saves_little(curve: str) -> None:
    trial, count, rows = Trial(most=8), 256, 64

    def stage(number: int, seed: int) -> tuple[StageOutlook, float]:
        work = workload("independent", num_generators=number, per_generator=-(-count // number), seed=seed)
        scenario = Scenario(num_generators=number, curve=PRESETS[curve], rows=rows, pulls=True)
        t0, c = scenario.curve.fitted(rows, busy_share=0.0)
        total, longest = float(work.lengths.sum()), float(work.lengths.max())
        outlook = StageOutlook(step_seconds=t0, sequence_seconds=c, tokens=total, longest=longest, rows=rows)
        return outlook, simulate(scenario, work).seconds

    for seed in range(30):
        trial.go_through(stage(trial.number, seed)[0])
    assert trial.num_reversals == 0
    settled = trial.number
    mean = {
        number: float(np.mean([stage(number, seed)[1] for seed in range(100, 106)]))
        for number in range(max(settled - 1, 1), min(settled + 1, 8) + 1)
    }
    if settled < 8:
        assert mean[settled + 1] >= (1 - MORE_SHARE - 0.1) * mean[settled], (settled, mean)
    if settled > 1:
        assert mean[settled - 1] >= (1 + FEWER_SHARE) * mean[settled] - 0.1 * mean[settled], (settled, mean)


def elastic_job(**generator: object) -> RLHFJob:
    content = example_job(promptsPerStep=8).model_dump(by_alias=True)
    content["spec"]["roles"]["generator"] |= generator
    return RLHFJob.model_validate(content)


def test_one_generator_has_a_rebalancer_where_there_may_be_more() -> None:
    assert "rebalancer" not in workers_of(elastic_job())
    assert workers_of(elastic_job(replicas={"min": 1, "max": 4}))["rebalancer"] == 1
    assert "rebalancer" not in workers_of(elastic_job(replicas={"min": 1, "max": 1}))
    assert elastic_of(elastic_job().spec) is None


def test_what_nobody_has_yet_is_work_too() -> None:
    work = StageWork(samples_per_step=20, max_tokens=500, rows=4)
    work.loaded(a_load(0, range(6)))
    there = [sample_of(number) for number in range(6)]
    assert work.num_to_come(there) == 14
    work.finished(example_sample(0, 0, job=JOB))
    work.finished(example_sample(0, 0, job=JOB))
    assert work.num_to_come(there[1:]) == 14
    fleet = Fleet.of(step_seconds=[0.01], sequence_seconds=[0.001], generator=[0] * 5, remaining=[50.0] * 5)
    outlook = work.outlook(fleet, there[1:], usual_tokens=100.0)
    assert (outlook.tokens, outlook.longest, outlook.rows) == (250.0 + 1400.0, 500.0, 4)
    work.loaded(a_load(0, [], step=2))
    assert work.num_to_come([]) == 20


def test_a_rebalancer_asks_for_more_generators_of_a_job_that_lets_it(tmp_path: Path) -> None:
    job = elastic_job(replicas={"min": 1, "max": 4})
    numbers = iter(range(1 << 20))
    knowledge = FleetKnowledge(
        "sums", max_tokens=256, began_at=0.0, draw=lambda _: str(next(numbers)), work=work_of(job.spec),
        elastic=elastic_of(job.spec),
    )  # fmt: skip
    now = 5.0
    for step in range(1, 5):
        for _ in range(4):
            now += 0.5
            knowledge.loaded(
                a_load(0, range(32), step=step, sample_ids=tuple(f"sums/{step}/{n}/0" for n in range(32))), now
            )
            knowledge.advise(now)
    assert knowledge.wanted is not None
    assert knowledge.wanted.number > 1

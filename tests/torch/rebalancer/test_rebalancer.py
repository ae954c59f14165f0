"""The rebalancing stage knows the latest signals and can die at any time; the advised number settles."""

import asyncio
import json
import math
import random
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_records import example_sample
from hypothesis import given, settings, strategies as st
from loads import MAX_TOKENS, a_load, knowing, moved, sample_of, skewed
from run_folders import example_job
from small_job import JOB, a_job
from stages import FakeEngine

from rlhfspec.engine.base import EngineStep, Request
from rlhfspec.engine.params import SamplingParams
from rlhfspec.generator.load import LoadMeter
from rlhfspec.job import RLHFJob
from rlhfspec.messages.loop import workers_of
from rlhfspec.messages.records import Move, Moved, Plan
from rlhfspec.messages.transport.clock import FakeClock
from rlhfspec.messages.transport.memory import MemoryTransport
from rlhfspec.moves.rebalancing import elastic as advised
from rlhfspec.moves.rebalancing.elastic import Elastic, StageOutlook, Wanted, worth
from rlhfspec.moves.rebalancing.fleet import Fleet
from rlhfspec.rebalancer.knowledge import MOVE_SECONDS, QUIET_SECONDS, FleetKnowledge, StageWork
from rlhfspec.rebalancer.service import RebalancerService, elastic_of, work_of
from rlhfspec.runs.folder.moves import MovesFile, read_moves
from rlhfspec.simulator.simulator import PRESETS, Scenario, simulate, workload
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.vitals import Vitals


def test_samples_move_from_an_overloaded_generator_to_an_idle_one() -> None:
    knowledge = knowing()
    skewed(knowledge, 5.0)
    advice = knowledge.advise(5.0)
    assert {(move.source, move.destination) for move in advice.moves} == {(0, 1)}
    assert len({move.sample_id for move in advice.moves}) == len(advice.moves) == 4
    assert "generator 0 ends in" in advice.moves[0].reason


def test_a_new_rebalancer_waits_before_it_plans() -> None:
    knowledge = knowing(began_at=5.0)
    skewed(knowledge, 5.4)
    assert knowledge.advise(5.4) is None
    assert knowledge.advise(6.0).moves


@pytest.mark.parametrize(
    ("changed", "seconds"),
    [
        ({"is_leaving": True}, 0.0),
        ({"weights_version": 1}, 0.0),
        ({"num_free_rows": 0}, 0.0),
        ({"num_free_tokens": 30}, 0.0),
        ({}, QUIET_SECONDS + 0.1),
    ],
    ids=["leaving", "other weights", "no row", "no blocks", "quiet"],
)
def test_no_sample_moves_to_a_generator_that_cannot_take_it(changed: dict[str, Any], seconds: float) -> None:
    knowledge = knowing()
    skewed(knowledge, 5.0, **changed)
    knowledge.loaded(a_load(0, range(8)), 5.0 + seconds)
    assert not knowledge.advise(5.0 + seconds).moves


def test_loads_of_an_older_incarnation_are_ignored() -> None:
    knowledge = knowing()
    skewed(knowledge, 5.0)
    knowledge.loaded(a_load(0, [], incarnation="b"), 5.1)
    knowledge.loaded(a_load(0, range(8), incarnation="a"), 5.2)  # late
    assert knowledge.advise(5.2).seen.sample_ids == []


def test_what_has_finished_is_not_moved() -> None:
    knowledge = knowing()
    skewed(knowledge, 5.0)
    for number in range(7):
        knowledge.finished(replace(example_sample(number, 0), id=sample_of(number), job=JOB))
    assert knowledge.advise(5.0).seen.sample_ids == [sample_of(7)]


def test_a_generator_moves_again_only_after_both_ends_reported() -> None:
    knowledge = knowing()
    skewed(knowledge, 5.0)
    first = knowledge.advise(5.0).moves
    skewed(knowledge, 6.5)
    assert not knowledge.advise(6.5).moves  # under way
    for move in first:
        knowledge.moved(moved(move), 6.6)
    assert not knowledge.advise(6.6).moves  # what is known is from before they ended
    skewed(knowledge, 6.7)
    assert not {move.sample_id for move in first} & {move.sample_id for move in knowledge.advise(6.7).moves}


def test_samples_that_prefill_workers_hand_over_keep_no_decoder_from_balance() -> None:
    knowledge = knowing(num_prefilling=1)
    for worker, samples in enumerate(([8], range(8), [])):
        knowledge.loaded(a_load(worker, samples), 5.0)
    handed_over = Move(
        id="own", job=JOB, sample_id=sample_of(8), source=0, destination=2, gain_seconds=0.0, reason="prefilled"
    )
    knowledge.moved(moved(handed_over, "kept"), 5.1)
    assert {(move.source, move.destination) for move in knowledge.advise(5.2).moves} == {(1, 2)}


def test_a_move_without_a_report_expires() -> None:
    knowledge = knowing()
    skewed(knowledge, 5.0)
    assert knowledge.advise(5.0).moves
    skewed(knowledge, 5.0 + MOVE_SECONDS)
    assert knowledge.advise(5.0 + MOVE_SECONDS).moves


def test_a_sample_whose_moves_are_refused_rests_longer_each_time() -> None:
    knowledge, tried = knowing(), []
    now = 5.0
    for _ in range(400):
        knowledge.loaded(a_load(0, [0, 1]), now)
        knowledge.loaded(a_load(1, []), now)
        advice = knowledge.advise(now)
        for move in advice.moves if advice else ():
            tried.append((now, move.sample_id))
            knowledge.moved(moved(move, "kept", reason="no room"), now + 0.01)
        now += 0.1
    assert len(tried) < 16  # of 40 s: 2, 4, 8 s apart and so on


def test_step_times_of_busy_and_lone_engines_are_learnt_apart() -> None:
    """On one host a step takes 9.2 ms with one sequence each, and 6.6 ms for one generator alone."""
    knowledge = knowing()
    among = {"host": "h", "step_seconds": 8.8e-3, "sequence_seconds": 0.37e-3}
    alone = {"host": "h", "step_seconds": 6.1e-3, "sequence_seconds": 0.46e-3}
    for tick in range(20):
        for other in (0, 1):
            knowledge.loaded(a_load(0, range(1 + tick), **among), 5.0)
            knowledge.loaded(a_load(1, range(50, 51 + tick), **among), 5.0)
            knowledge.loaded(a_load(1 - other, [], **among), 5.0)
            knowledge.loaded(a_load(other, range(1 + tick), **alone), 5.0)
            knowledge.loaded(a_load(1 - other, [], **among), 5.0)
    knowledge.loaded(a_load(0, [0, 1], **among), 6.0)
    knowledge.loaded(a_load(1, [2, 3], **among), 6.0)
    advice = knowledge.advise(6.0)
    assert len(advice.moves) == 2
    assert len({move.destination for move in advice.moves}) == 1
    assert all(move.reason.startswith("this host is faster with only 1 of its engines") for move in advice.moves)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_killed_anywhere_it_plans_again_and_keeps_the_laws(data: st.DataObject) -> None:
    holds: dict[int, set[int]] = {0: set(range(24)), 1: set(), 2: {30}}
    versions, leaving = {0: 0, 1: 0, 2: 0}, set[int]()
    knowledge, now = knowing(), 2.0
    said: dict[int, set[str]] = {}
    moved_at: dict[str, float] = {}
    for _ in range(data.draw(st.integers(5, 40))):
        now += data.draw(st.sampled_from([0.1, 0.3, 1.0]))
        event = data.draw(st.sampled_from(["say", "say", "say", "plan", "plan", "kill", "weights", "leave", "finish"]))
        if event == "kill":
            knowledge, said = knowing(now), {}
        elif event == "weights":
            versions[data.draw(st.integers(0, 2))] += 1
        elif event == "leave":
            leaving = {data.draw(st.integers(0, 2))} if not leaving else set()
        elif event == "finish":
            place = data.draw(st.integers(0, 2))
            holds[place] = set(sorted(holds[place])[:-1])
        elif event == "say":
            for place in data.draw(st.lists(st.integers(0, 2), max_size=4)):
                load = a_load(place, sorted(holds[place]), weights_version=versions[place], is_leaving=place in leaving)
                knowledge.loaded(load, now)
                said[place] = set(load.sample_ids)
        elif (advice := knowledge.advise(now)) is not None:
            for move in advice.moves:
                assert move.sample_id in said[move.source]
                assert move.source != move.destination
                assert move.sample_id not in moved_at or now - moved_at[move.sample_id] >= 1.0 - 1e-9
                moved_at[move.sample_id] = now
                number = int(move.sample_id.split("/")[2])
                if number in holds[move.source] and data.draw(st.booleans()):
                    holds[move.source].discard(number)
                    holds[move.destination].add(number)
                    if data.draw(st.booleans()):
                        knowledge.moved(moved(move), now)
    knowledge, now = knowing(now), now + 1.0
    skewed(knowledge, now)
    assert knowledge.advise(now).moves


async def test_the_stage_publishes_moves_and_says_why(tmp_path: Path) -> None:
    clock = FakeClock()
    workers = {"generator": 2, "rebalancer": 1, "view": 1}
    bus = await Bus.open(MemoryTransport(clock=clock), JOB, workers=workers, clock=clock)
    job = a_job(generation={"maxTokens": MAX_TOKENS}, roles={"generator": {"workers": 2}})
    service = RebalancerService(
        0, Vitals(clock), bus.of("rebalancer"), job=job, moves=MovesFile(tmp_path, now=lambda: 7.0)
    )
    moves = await bus.of("generator").subscribe(Move)
    plans = await bus.of("view").subscribe(Plan)
    running = asyncio.create_task(service.run())
    await clock.advance(2.0)
    for worker, samples in ((0, range(8)), (1, range(0))):
        load = replace(a_load(worker, samples), id=f"load/{worker}")
        await bus.of("generator", worker).publish(load)
    told: list[Any] = []
    while len(told) < 4:
        told += [each.record for each in await moves.pull(max_records=8, timeout_seconds=1e9)]
    [plan] = await plans.pull(max_records=8, timeout_seconds=1e9)
    ended = moved(told[0], "kept", reason="no room")
    await bus.of("generator").publish(ended)
    while not any(line["kind"] == "moved" for line, _ in read_moves(tmp_path)):
        await clock.advance(0.25)
        await asyncio.sleep(0)
    await service.stop()
    await running
    service.close()
    assert [move.sample for move in plan.record.moves] == [move.sample_id for move in told]
    assert plan.record.latest_end_after < plan.record.latest_end
    lines = [line for line, _ in read_moves(tmp_path)]
    assert [line["kind"] for line in lines[:2]] == ["plan", "moved"]
    assert lines[1]["reason"] == "no room"


def test_damaged_lines_of_moves_are_left_out_and_a_full_disk_stops_nothing(tmp_path: Path) -> None:
    nothing = Plan(id="", job="sums", num_samples=1, num_generators=2, latest_end=1.0, latest_end_after=1.0)
    file = MovesFile(tmp_path)
    file.plan(replace(nothing, id="one"))
    with (tmp_path / "moves.jsonl").open("a") as half:
        half.write('{"kind": "pl')
    again = MovesFile(tmp_path)
    again.plan(replace(nothing, id="two"))
    assert [line["id"] for line, _ in read_moves(tmp_path)] == ["one", "two"]
    assert not list(read_moves(tmp_path, offset=max(offset for _, offset in read_moves(tmp_path))))
    broken = MovesFile(tmp_path / "missing")
    broken.plan(replace(nothing, id="three"))
    broken.plan(replace(nothing, id="four"))


def test_a_generator_says_what_a_plan_needs() -> None:
    now = [0.0]
    fake: Any = FakeEngine(random.Random(0))
    meter = LoadMeter(JOB, "generator-1", fake, worker=1, incarnation="b", sequences=fake.sequences, now=lambda: now[0])
    assert meter.idle() is None  # it has just begun
    for number in range(3):
        fake.submit(Request(id=f"{number}", prompt_token_ids=(1, 2), params=SamplingParams(), seed=0))
    for rows in (*range(1, 33),) * 8:
        passes = 1 + rows % 3
        total = passes * rows
        meter.stepped(
            EngineStep(gains=(), finished=(), num_decoding=total, num_prefill_tokens=0, num_verified_nodes=2 * total,
                       num_committed=2 * total, strategy="model", num_passes=passes,
                       seconds=passes * 2 * (8.8e-3 + 0.37e-3 * rows))
        )  # fmt: skip
    for _ in range(20):
        meter.stepped(
            EngineStep(gains=(), finished=(), num_decoding=2, num_prefill_tokens=100, num_verified_nodes=2,
                       num_committed=2, strategy="model", seconds=0.05 + 8.8e-3 + 0.37e-3 * 2)
        )  # fmt: skip
    for _ in range(20):
        meter.stepped(
            EngineStep(gains=(), finished=(), num_decoding=0, num_prefill_tokens=10, num_verified_nodes=0,
                       num_committed=0, strategy="off", seconds=0.005 + 8.8e-3)
        )  # fmt: skip
    now[0] = 1.0
    load = meter.load()
    assert (load.worker, load.incarnation, load.sample_ids) == (1, "b", ("0", "1", "2"))
    assert load.step_seconds == pytest.approx(8.8e-3, rel=0.05)  # a token's share of a step with drafts
    assert load.sequence_seconds == pytest.approx(0.37e-3, rel=0.05)
    assert load.prefill_seconds == pytest.approx(5e-4, rel=0.05)
    while fake.has_work:
        fake.step()
    assert meter.idle() is None
    now[0] = 2.0
    idle = meter.idle()
    assert (idle.num_running, idle.sample_ids) == (0, ())


def test_samples_that_pause_make_a_generator_look_slower() -> None:
    fake: Any = FakeEngine(random.Random(0))
    loads = []
    for num_paused in (0, 28):
        meter = LoadMeter(JOB, "generator-1", fake, worker=1)
        for _ in range(100):
            meter.stepped(
                EngineStep(gains=(), finished=(), num_decoding=4, num_paused=num_paused, num_prefill_tokens=0,
                           num_verified_nodes=0, num_committed=4, strategy="plain", seconds=0.01)
            )  # fmt: skip
        loads.append(meter.now())
    assert loads[1].sequence_seconds > loads[0].sequence_seconds
    assert loads[1].step_seconds + 32 * loads[1].sequence_seconds == pytest.approx(8 * 0.01, rel=0.1)


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

    def go_through(self, outlook: StageOutlook, *, seconds: float = advised.COOLDOWN_SECONDS) -> Wanted | None:
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
def test_equal_work_never_asks_for_more_and_for_fewer_generators(outlook: StageOutlook, number: int) -> None:
    better = worth(outlook, number, least=LEAST, most=MOST)
    assert worth(outlook, better, least=LEAST, most=MOST) <= better, "the rest of what pays is asked for at once"
    if better > number:
        assert outlook.seconds(better) <= (1 - advised.MORE_SHARE) * outlook.seconds(better - 1)
        assert worth(outlook, better, least=LEAST, most=MOST) == better
    if better < number:
        assert outlook.seconds(better) < (1 + advised.FEWER_SHARE) * outlook.seconds(number)


@given(outlooks, st.integers(1, 16))
def test_repeated_equal_stages_settle_without_reversals(outlook: StageOutlook, begins_with: int) -> None:
    trial = Trial(begins_with)
    for _ in range(4 * MOST + 8):
        trial.go_through(outlook)
    assert trial.num_reversals == 0
    assert len(set(trial.history[-4:])) == 1
    settled = trial.number
    assert worth(outlook, settled, least=LEAST, most=MOST) == settled


@settings(max_examples=30)
@given(outlooks, st.integers(0, 1 << 30), st.floats(1.0, 8.0))
def test_random_stages_make_ever_fewer_reversals(outlook: StageOutlook, seed: int, spread: float) -> None:
    draw, trial, num_stages = np.random.default_rng(seed), Trial(), 600
    for _ in range(num_stages):
        tokens, longest = np.exp(draw.uniform(-math.log(spread), math.log(spread), 2))
        scaled = {"tokens": outlook.tokens * tokens, "longest": outlook.longest * longest}
        trial.go_through(replace(outlook, **scaled))
    assert trial.num_reversals <= 2 * math.log2(num_stages)
    assert len(set(trial.history[-num_stages // 4 :])) <= 3


def usual(tokens: float = 12_800.0) -> StageOutlook:
    return StageOutlook(step_seconds=0.01, sequence_seconds=0.001, tokens=tokens, longest=200.0, rows=16)


def test_the_advice_changes_after_two_stages_and_the_cooldown() -> None:
    trial = Trial()
    assert trial.go_through(usual(), seconds=1.0) is None, "begun in the middle of it"
    assert trial.go_through(usual(), seconds=1.0) is None
    assert trial.go_through(usual(), seconds=1.0) is None
    wanted = trial.go_through(usual(), seconds=1.0)
    assert (wanted.number, wanted.because) == (4, "a stage takes 20.8 s with 1 and 5.2 s with 4")
    for _ in range(20):
        assert trial.go_through(usual(200.0), seconds=1.0) == wanted, "it has only just changed"
    fewer = [trial.go_through(usual(200.0)) for _ in range(12)]
    assert fewer[-1].number == 1


def test_the_number_of_generators_stays_within_its_bounds() -> None:
    for begins_with in (1, 9):
        trial = Trial(begins_with, least=2, most=3)
        for tokens in (12_800.0, 100.0):
            for _ in range(20):
                wanted = trial.go_through(usual(tokens))
        assert wanted is not None
        assert set(trial.history[5:]) == {2, 3}


def test_a_reversed_reduction_is_repeated_ever_later() -> None:
    trial, lasted = Trial(), []
    for _ in range(4):
        while trial.number < 4:
            trial.go_through(usual())
        before = len(trial.history)
        while trial.number == 4:
            trial.go_through(usual(200.0))
        lasted.append(len(trial.history) - before)
    assert all(later > 1.5 * earlier for earlier, later in pairwise(lasted)), lasted


def test_a_long_stage_asks_for_more_generators_before_it_ends() -> None:
    elastic, long = Elastic(least=1, most=4), usual(400_000.0)
    assert elastic.learn(1, long, 0.0, num_generators=1) is None
    assert elastic.learn(1, long, advised.LONG_STAGE_SECONDS - 1, num_generators=1) is None
    assert elastic.learn(1, long, advised.LONG_STAGE_SECONDS, num_generators=1) == Wanted(
        4, "a stage takes 650.0 s with 1 and 162.5 s with 4"
    )
    for second in range(1000):
        assert elastic.learn(1, usual(10.0), advised.LONG_STAGE_SECONDS + second, num_generators=4).number == 4


@pytest.mark.parametrize("curve", ["plain", "t0=32c", "t0=2.5c", "memory-bound"])
def test_simulated_stages_settle_where_one_more_generator_saves_little(curve: str) -> None:
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
    numbers = range(max(settled - 1, 1), min(settled + 1, 8) + 1)
    mean = {number: float(np.mean([stage(number, seed)[1] for seed in range(100, 106)])) for number in numbers}
    if settled < 8:
        assert mean[settled + 1] >= (1 - advised.MORE_SHARE - 0.1) * mean[settled], (settled, mean)
    if settled > 1:
        assert mean[settled - 1] >= (1 + advised.FEWER_SHARE) * mean[settled] - 0.1 * mean[settled], (settled, mean)


def elastic_job(**generator: object) -> RLHFJob:
    content = example_job(promptsPerStep=8).model_dump(by_alias=True)
    content["spec"]["roles"]["generator"] |= generator
    return RLHFJob.model_validate(content)


def test_one_generator_has_a_rebalancer_where_there_may_be_more() -> None:
    assert "rebalancer" not in workers_of(elastic_job())
    assert workers_of(elastic_job(replicas={"min": 1, "max": 4}))["rebalancer"] == 1
    assert "rebalancer" not in workers_of(elastic_job(replicas={"min": 1, "max": 1}))
    assert elastic_of(elastic_job().spec) is None


def test_samples_not_yet_pulled_count_as_work() -> None:
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
            names = tuple(f"sums/{step}/{n}/0" for n in range(32))
            knowledge.loaded(a_load(0, range(32), step=step, sample_ids=names), now)
            knowledge.advise(now)
    assert knowledge.wanted.number > 1


def test_a_move_recorded_before_there_were_codes_is_still_read(tmp_path: Path) -> None:
    moved = Moved(id="m", job=JOB, sample_id="x", source=0, destination=1, how="kept", reason="room: none")
    line = {"kind": "moved", "at": 1.0, **asdict(moved)}
    del line["code"]
    (tmp_path / "moves.jsonl").write_text(json.dumps(line) + "\n")
    assert [read for read, _ in read_moves(tmp_path)] == [line]

"""The rebalancing stage knows the latest signals and can die at any time."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loads import MAX_TOKENS, a_load, knowing, moved, sample_of, skewed
from small_job import JOB, a_job
from stages import FakeEngine

from rlhfspec.generator.load import LoadMeter
from rlhfspec.messages.records import Move, Plan
from rlhfspec.messages.transport.clock import FakeClock
from rlhfspec.messages.transport.memory import MemoryTransport
from rlhfspec.rebalancer.knowledge import MOVE_SECONDS, QUIET_SECONDS, Advice, FleetKnowledge
from rlhfspec.rebalancer.service import RebalancerService
from rlhfspec.runs.folder.moves import MovesFile, read_moves
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.vitals import Vitals
from rlhfspec.trainer.collector import example_sample


def advised(knowledge: FleetKnowledge, now: float) -> Advice:
    advice = knowledge.advise(now)
    assert advice is not None
    return advice


def test_what_is_too_much_for_one_goes_to_who_has_nothing() -> None:
    knowledge = knowing()
    skewed(knowledge, 5.0)
    advice = advised(knowledge, 5.0)
    assert {(move.source, move.destination) for move in advice.moves} == {(0, 1)}
    assert len({move.sample_id for move in advice.moves}) == len(advice.moves) == 4
    assert "generator 0 ends in" in advice.moves[0].reason


def test_it_waits_a_little_after_it_began_for_what_moved_before() -> None:
    knowledge = knowing(began_at=5.0)
    skewed(knowledge, 5.4)
    assert knowledge.advise(5.4) is None
    assert advised(knowledge, 6.0).moves


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
def test_nothing_goes_to_who_cannot_take_it(changed: dict[str, Any], seconds: float) -> None:
    knowledge = knowing()
    skewed(knowledge, 5.0, **changed)
    knowledge.loaded(a_load(0, range(8)), 5.0 + seconds)
    assert not advised(knowledge, 5.0 + seconds).moves


def test_another_incarnation_holds_nothing_of_what_the_one_before_held() -> None:
    knowledge = knowing()
    skewed(knowledge, 5.0)
    knowledge.loaded(a_load(0, [], incarnation="b"), 5.1)
    knowledge.loaded(a_load(0, range(8), incarnation="a"), 5.2)  # late
    assert advised(knowledge, 5.2).seen.sample_ids == []


def test_what_has_finished_is_not_moved() -> None:
    knowledge = knowing()
    skewed(knowledge, 5.0)
    for number in range(7):
        knowledge.finished(replace(example_sample(number, 0), id=sample_of(number), job=JOB))
    assert advised(knowledge, 5.0).seen.sample_ids == [sample_of(7)]


def test_the_next_moves_of_a_generator_come_when_the_last_ended_and_both_have_said_what_they_have() -> None:
    knowledge = knowing()
    skewed(knowledge, 5.0)
    first = advised(knowledge, 5.0).moves
    skewed(knowledge, 6.5)
    assert not advised(knowledge, 6.5).moves  # under way
    for move in first:
        knowledge.moved(moved(move), 6.6)
    assert not advised(knowledge, 6.6).moves  # what is known is from before they ended
    skewed(knowledge, 6.7)
    assert not {move.sample_id for move in first} & {move.sample_id for move in advised(knowledge, 6.7).moves}


def test_a_move_that_nobody_tells_of_ends_after_a_while() -> None:
    knowledge = knowing()
    skewed(knowledge, 5.0)
    assert advised(knowledge, 5.0).moves
    skewed(knowledge, 5.0 + MOVE_SECONDS)
    assert advised(knowledge, 5.0 + MOVE_SECONDS).moves


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


def test_curves_among_others_and_alone_are_learnt_apart() -> None:
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
    advice = advised(knowledge, 6.0)
    assert len(advice.moves) == 2
    assert len({move.destination for move in advice.moves}) == 1
    assert all(move.reason.startswith("as few as 1 of this host's engines are faster") for move in advice.moves)


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
    assert advised(knowledge, now).moves


def test_the_stage_publishes_moves_and_says_why(tmp_path: Path) -> None:
    async def main() -> tuple[list[Any], Plan]:
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
        return told, plan.record

    told, plan = asyncio.run(main())
    assert [move.sample for move in plan.moves] == [move.sample_id for move in told]
    assert plan.latest_end_after < plan.latest_end
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
    last = max(offset for _, offset in read_moves(tmp_path))
    assert not list(read_moves(tmp_path, offset=last))
    broken = MovesFile(tmp_path / "missing")
    broken.plan(replace(nothing, id="three"))
    broken.plan(replace(nothing, id="four"))


def test_a_generator_says_what_a_plan_needs() -> None:
    import random

    from rlhfspec.engine.base import EngineStep, Request
    from rlhfspec.engine.params import SamplingParams

    now = [0.0]
    engine: Any = FakeEngine(random.Random(0))
    meter = LoadMeter(
        JOB, "generator-1", engine, worker=1, incarnation="b", sequences=engine.sequences, now=lambda: now[0]
    )
    assert meter.idle() is None  # it has just begun
    for number in range(3):
        engine.submit(Request(id=f"{number}", prompt_token_ids=(1, 2), params=SamplingParams(), seed=0))
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
    now[0] = 1.0
    load = meter.load()
    assert load is not None
    assert (load.worker, load.incarnation, load.sample_ids) == (1, "b", ("0", "1", "2"))
    assert load.step_seconds == pytest.approx(8.8e-3, rel=0.05)  # a token's share of a step with drafts
    assert load.sequence_seconds == pytest.approx(0.37e-3, rel=0.05)
    assert load.prefill_seconds == pytest.approx(5e-4, rel=0.05)
    while engine.has_work:
        engine.step()
    assert meter.idle() is None
    now[0] = 2.0
    idle = meter.idle()
    assert idle is not None
    assert (idle.num_running, idle.sample_ids) == (0, ())

"""Run state keeps the newest record of each worker in any order and repetition."""

import dataclasses
import random
from dataclasses import replace
from functools import partial
from typing import Any

from dashboards import load, snapshot
from hypothesis import given, strategies as st
from wire_records import records

from rlhfspec.messages.loop import BY_NAME
from rlhfspec.messages.records import Heartbeat, Load, Plan, Record, WorkerInfo
from rlhfspec.messages.transport.clock import FakeClock
from rlhfspec.runs.live.run_state import (
    NEVER,
    SILENT_SECONDS,
    HeldNews,
    KnownRun,
    ProcessNews,
    RunState,
    RunWorker,
    Told,
    after,
    without_gone,
    worker_state,
)

NEAR = st.integers(0, 2)
STAGES = st.sampled_from([*BY_NAME, "view"])


FIXED = {"id": "b", "job": "sums", "since_seconds": 1.0, "overdue_seconds": -1.0}
DOING = {"doing": st.sampled_from(["working", "waiting", "stopped"]), "what": st.text(max_size=3)}
BUSY = st.integers(0, 9).map(float)
BEATS = st.builds(partial(Heartbeat, **FIXED), stage=STAGES, worker=NEAR, busy_seconds=BUSY, **DOING)
LOADS = st.builds(lambda worker, number: load(worker, running=number), NEAR, st.integers(0, 99))
PLANS = st.builds(lambda number: Plan(id="p", job="sums", num_wanted=number, why_wanted=str(number)), NEAR)
INFOS = st.builds(partial(replace, snapshot()[0]), stage=STAGES, worker=NEAR, pid=st.integers(1, 3))
PHASES = st.sampled_from(["starting", "restarting", "left"])
PROCESSES = st.builds(ProcessNews, stage=STAGES, worker=NEAR, phase=PHASES, by_hand=st.booleans())
HELD = st.builds(HeldNews, stage=STAGES, worker=NEAR, is_held=st.booleans())


def _with_times(told: list[Any], times: list[int], hours: list[int]) -> list[Told]:
    timed: list[Told] = []
    busy: dict[Any, float] = {}
    for at, each in sorted(zip(map(float, times), told, strict=True), key=lambda pair: pair[0]):
        if isinstance(each, Heartbeat | ProcessNews):
            key = each.stage, each.worker
            busy[key] = busy.get(key, 0.0) + hours[int(at)] if isinstance(each, Heartbeat) else 0.0
            each = replace(each, busy_seconds=busy[key]) if isinstance(each, Heartbeat) else each
        timed.append((at, each))
    return [timed[place] for place in times]


def _tellings(told: list[Any]) -> st.SearchStrategy[list[Told]]:
    hours = st.lists(st.integers(0, 1), min_size=len(told), max_size=len(told))
    return st.builds(_with_times, st.just(told), st.permutations(range(len(told))), hours)


TELLINGS = st.lists(BEATS | LOADS | PLANS | INFOS | PROCESSES | HELD, max_size=24).flatmap(_tellings)


def reduced(told: list[Told]) -> RunState:
    return after(RunState(), told)


def by_hand(told: list[Told]) -> RunState:
    workers: dict[tuple[str, int], dict[str, Any]] = {}
    wanted: dict[str, Any] = {}
    for at, each in sorted(told, key=lambda pair: pair[0]):
        match each:
            case Plan() if each.num_wanted:
                wanted = {"num_wanted": each.num_wanted, "wanted_at": at}
            case Load():
                workers.setdefault(("generator", each.worker), {}).update(load=each, loaded_at=at)
            case Heartbeat() | WorkerInfo() | ProcessNews() | HeldNews() if each.stage in BY_NAME:
                _tell(workers.setdefault((each.stage, each.worker), {}), each, at)
    made = {key: RunWorker(stage=key[0], worker=key[1], **fields) for key, fields in workers.items()}
    return RunState(workers=made, **wanted)


def _tell(worker: dict[str, Any], each: Heartbeat | WorkerInfo | ProcessNews | HeldNews, at: float) -> None:
    match each:
        case Heartbeat():
            if "state" not in worker or worker["state"].busy_seconds < each.busy_seconds:
                worker["busy_at"] = at
            worker.update(state=worker_state(each), heard_at=at)
        case WorkerInfo():
            worker.update(info=each, ready_at=at)
        case HeldNews():
            worker.update(is_held=each.is_held, held_at=at)
        case ProcessNews():
            loads = {name: value for name, value in worker.items() if name in ("load", "loaded_at")}
            worker.clear()
            worker.update(loads, process=each, process_at=at)


@given(TELLINGS, st.randoms(use_true_random=False))
def test_the_newest_record_wins_in_any_order(told: list[Told], chance: Any) -> None:
    again = [*told, *chance.sample(told, len(told) // 2)]
    random.Random(chance.random()).shuffle(again)
    assert reduced(told) == reduced(again) == by_hand(told)


@given(TELLINGS)
def test_a_state_is_never_changed_in_place(told: list[Told]) -> None:
    states = [RunState()]
    kept = []
    for each in told:
        kept.append(dataclasses.asdict(states[-1]))
        states.append(after(states[-1], [each]))
    assert [dataclasses.asdict(state) for state in states[:-1]] == kept
    assert states[-1] == reduced(told), "in pieces, or at once"


@given(TELLINGS, st.integers(0, 60).map(float), st.integers(1, 40).map(float))
def test_without_gone_drops_workers_that_left_or_are_silent(told: list[Told], now: float, after_seconds: float) -> None:
    run = without_gone(reduced(told), now=now, after_seconds=after_seconds)
    whole = reduced(told).workers
    for key, worker in run.workers.items():
        assert worker.phase != "left"
        assert max(worker.spoke_at, worker.loaded_at) > now - after_seconds or worker.phase in ("held", "restarting")
        assert worker.state in (None, whole[key].state)
        assert worker.load in (None, whole[key].load)
        assert (worker.load is None) == (now - whole[key].loaded_at >= after_seconds)
    for key, worker in whole.items():
        if key not in run.workers:
            assert worker.phase == "left" or max(worker.spoke_at, worker.loaded_at) <= now - after_seconds
    assert without_gone(run, now=now, after_seconds=after_seconds) == run


@given(BEATS.filter(lambda beat: beat.stage in BY_NAME), st.floats(0, 100))
def test_a_worker_is_silent_after_silent_seconds(beat: Heartbeat, seconds: float) -> None:
    [worker] = after(RunState(), [(0.0, beat)]).workers.values()
    assert worker.is_silent(seconds) == (seconds > SILENT_SECONDS)
    assert worker.is_load_silent(seconds)


@given(records)
def test_records_of_any_kind_are_accepted(record: Record) -> None:
    run = after(RunState(), [(1.0, record)])
    if not isinstance(record, Heartbeat | WorkerInfo | Load | Plan):
        assert run == RunState()
    assert all(max(worker.spoke_at, worker.loaded_at) == 1.0 > NEVER for worker in run.workers.values())


@given(TELLINGS, st.integers(-9, 9).map(float))
def test_a_shifted_clock_shifts_all_times_alike(told: list[Told], ahead: float) -> None:
    later = reduced([(at + ahead, each) for at, each in told])
    assert {key: worker.later(ahead) for key, worker in reduced(told).workers.items()} == later.workers


def test_records_are_applied_when_the_run_is_read() -> None:
    known = KnownRun(FakeClock())
    known.tell(Plan(id="p", job="sums", num_wanted=2, why_wanted="so"))
    assert known.run is known.run
    assert known.run.num_wanted == 2


def test_the_last_generator_to_claim_a_sample_owns_it() -> None:
    one, other = load(owned=("a", "b")), load(1, owned=("b",))
    assert reduced([(1.0, one), (2.0, other)]).owners == {"a": ("generator", 0), "b": ("generator", 1)}
    assert reduced([(3.0, one), (2.0, other)]).owners == {"a": ("generator", 0), "b": ("generator", 0)}

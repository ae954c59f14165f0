"""The state of a run: the newest that was told of each worker, whatever came in which order and how often."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from wire_records import records

from rlhfspec.messages.loop import BY_NAME
from rlhfspec.messages.records import Heartbeat, Load, Plan, Record
from rlhfspec.runs.live.live import WorkerSnapshot
from rlhfspec.runs.view.roster import worker_state
from rlhfspec.runs.view.run_state import NEVER, RunState, RunWorker, Told, after, without_gone
from rlhfspec.stage.silence import SILENT_SECONDS

NEAR = st.integers(0, 2)


def _snapshot(beat: Heartbeat, load: Load | None, pid: int) -> WorkerSnapshot:
    own = load and replace(load, worker=beat.worker) if beat.stage == "generator" else None
    return WorkerSnapshot(host=f"node-{pid}", pid=pid, state=worker_state(beat), load=own)


BEATS = st.builds(
    Heartbeat,
    id=st.just("b"),
    job=st.just("sums"),
    stage=st.sampled_from([*BY_NAME, "view"]),
    worker=NEAR,
    doing=st.sampled_from(["working", "waiting", "stopped"]),
    what=st.text(max_size=3),
    since_seconds=st.just(1.0),
    overdue_seconds=st.just(-1.0),
    busy_seconds=st.integers(0, 9).map(float),
)
LOADS = st.builds(
    lambda worker, number: Load(
        id="l", job="sums", generator="g", worker=worker, step=number, num_running=number, num_waiting=0,
        num_finished=0, num_tokens=0, tokens_per_second=1.0, accepted_per_verification=None, strategy="",
    ),
    NEAR, st.integers(0, 99),
)  # fmt: skip
PLANS = st.builds(lambda number: Plan(id="p", job="sums", num_wanted=number, why_wanted=str(number)), NEAR)
SNAPSHOTS = st.builds(_snapshot, BEATS, st.none() | LOADS, st.integers(1, 3))
TELLINGS = st.lists(BEATS | LOADS | PLANS | SNAPSHOTS, max_size=24).flatmap(
    lambda told: st.permutations(range(len(told))).map(lambda times: list(zip(map(float, times), told, strict=True)))
)


def reduced(told: list[Told]) -> RunState:
    return after(RunState(), told)


def by_hand(told: list[Told]) -> RunState:
    """The slow twin: looks for the newest of each kind among all that was told."""
    workers: dict[tuple[str, int], dict[str, Any]] = {}
    wanted: dict[str, Any] = {}
    for at, each in sorted(told, key=lambda pair: pair[0]):
        if isinstance(each, Plan) and each.num_wanted:
            wanted = {"num_wanted": each.num_wanted, "why_wanted": each.why_wanted, "wanted_at": at}
        load = each if isinstance(each, Load) else each.load if isinstance(each, WorkerSnapshot) else None
        state = (
            worker_state(each)
            if isinstance(each, Heartbeat)
            else each.state
            if isinstance(each, WorkerSnapshot)
            else None
        )
        if state is not None and state.stage in BY_NAME:
            workers.setdefault((state.stage, state.worker), {}).update(state=state, heard_at=at)
            if isinstance(each, WorkerSnapshot):
                workers[state.stage, state.worker].update(host=each.host, pid=each.pid, placed_at=at)
        if load is not None:
            workers.setdefault(("generator", load.worker), {}).update(load=load, loaded_at=at)
    made = {key: RunWorker(stage=key[0], worker=key[1], **fields) for key, fields in workers.items()}
    return RunState(workers=made, **wanted)


@given(TELLINGS, st.randoms(use_true_random=False))
def test_the_newest_counts_in_whatever_order_and_however_often_it_is_told(told: list[Told], chance: Any) -> None:
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
def test_what_is_old_is_gone_and_what_comes_again_is_there_again(
    told: list[Told], now: float, after_seconds: float
) -> None:
    run = without_gone(reduced(told), now=now, after_seconds=after_seconds)
    whole = reduced(told).workers
    for key, worker in run.workers.items():
        assert worker.last_at > now - after_seconds
        assert worker.state in (None, whole[key].state)
        assert worker.load in (None, whole[key].load)
        assert (worker.state is None) == (now - whole[key].heard_at >= after_seconds)
        assert (worker.load is None) == (now - whole[key].loaded_at >= after_seconds)
    assert all(worker.last_at <= now - after_seconds for key, worker in whole.items() if key not in run.workers)
    assert without_gone(run, now=now, after_seconds=after_seconds) == run


@given(BEATS.filter(lambda beat: beat.stage in BY_NAME), st.floats(0, 100))
def test_a_worker_is_silent_once_it_has_said_nothing_for_so_long(beat: Heartbeat, seconds: float) -> None:
    [worker] = after(RunState(), [(0.0, beat)]).workers.values()
    assert worker.is_silent(seconds) == (seconds > SILENT_SECONDS)
    assert worker.is_load_silent(seconds)


@given(records)
def test_any_record_may_be_heard(record: Record) -> None:
    run = after(RunState(), [(1.0, record)])
    if not isinstance(record, Heartbeat | Load | Plan):
        assert run == RunState()
    assert all(worker.last_at == 1.0 > NEVER for worker in run.workers.values())

"""Interleaved pipelines: schedules are feasible and no longer than the serial one."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from runs import command

from rlhfspec.simulator.pipelines import schedule as schedules
from rlhfspec.simulator.pipelines.schedule import PipelineCase, PipelineSchedule, PlacedTask, Task, search, serial


def check(case: PipelineCase, found: PipelineSchedule) -> None:
    """Check by the definition: all tasks once, in order, one at a time per stage, memory as in 1F1B."""
    placed = {each.task: each for each in found.placed}
    assert len(placed) == len(found.placed) == 4 * case.num_stages * case.num_micro_batches
    for task, each in placed.items():
        times = schedules.BACKWARD_TIMES if task.is_backward else 1.0
        assert each.end - each.start == pytest.approx(times * case.forward_seconds[task.model])
        assert each.stage == (task.place if task.model == 0 else case.num_stages - 1 - task.place)
        for before in needed(case, task):
            assert placed[before].end <= each.start
    for stage in range(case.num_stages):
        of_stage = sorted((each for each in found.placed if each.stage == stage), key=lambda each: each.start)
        assert all(one.end <= other.start for one, other in pairwise(of_stage))
    for model in (0, 1):
        for place in range(case.num_stages):
            for each in placed.values():
                if (each.task.model, each.task.place) == (model, place):
                    assert under_way(case, placed, model, place, each.start) <= case.num_stages - place


def needed(case: PipelineCase, task: Task) -> list[Task]:
    model, micro_batch, place = task.model, task.micro_batch, task.place
    if not task.is_backward:
        return [Task(model, micro_batch, place - 1, is_backward=False)] if place else []
    after = [] if place == case.num_stages - 1 else [Task(model, micro_batch, place + 1, is_backward=True)]
    return [Task(model, micro_batch, place, is_backward=False), *after]


def under_way(case: PipelineCase, placed: dict[Task, PlacedTask], model: int, place: int, moment: float) -> int:
    tasks = ([Task(model, micro, place, back) for back in (False, True)] for micro in range(case.num_micro_batches))
    of_place = ((placed[forward].start, placed[backward].end) for forward, backward in tasks)
    return sum(start <= moment < end for start, end in of_place)


CASES = st.builds(
    PipelineCase,
    num_stages=st.integers(1, 5),
    num_micro_batches=st.integers(1, 6),
    forward_seconds=st.tuples(st.just(1.0), st.sampled_from([0.25, 0.5, 1.0, 2.0])),
)


@settings(max_examples=60, deadline=None)
@given(CASES, st.integers(0, 1000))
def test_every_schedule_is_one_that_stages_could_follow(case: PipelineCase, seed: int) -> None:
    found = search(case, num_rules=20, seed=seed)
    for each in (serial(case), found):
        check(case, each)
    assert case.least_seconds <= found.seconds <= serial(case).seconds
    assert found == search(case, num_rules=20, seed=seed)


@settings(max_examples=60, deadline=None)
@given(CASES)
def test_the_serial_schedule_has_the_length_and_memory_of_1f1b(case: PipelineCase) -> None:
    """Its known length is each model's micro-batches plus one pass through all stages."""
    times = (case.num_micro_batches + case.num_stages - 1) * (1 + schedules.BACKWARD_TIMES)
    found = serial(case)
    assert found.seconds == pytest.approx(times * sum(case.forward_seconds))
    assert found.peak_activations == min(case.num_stages, case.num_micro_batches) * max(1.0, case.forward_seconds[1])


@pytest.mark.parametrize(
    ("stages", "micro", "critic", "before", "most"),
    [
        (2, 4, 1.0, 30.0, 24.0),
        (4, 4, 1.0, 42.0, 27.0),
        (4, 8, 1.0, 66.0, 52.0),
        (8, 8, 1.0, 90.0, 59.0),
        (4, 8, 0.5, 49.5, 40.5),
        (8, 8, 0.25, 56.25, 45.25),
    ],
)
def test_search_stays_within_the_bound(stages: int, micro: int, critic: float, before: float, most: float) -> None:
    case = PipelineCase(num_stages=stages, num_micro_batches=micro, forward_seconds=(1.0, critic))
    found = search(case)
    assert serial(case).seconds == before
    assert found.seconds <= most
    assert found.peak_activations <= stages + critic


def test_a_stage_that_keeps_more_than_1f1b_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = PipelineCase(num_stages=3, num_micro_batches=5)
    monkeypatch.setattr(PipelineCase, "most_under_way", lambda self, place: 5)
    with pytest.raises(AssertionError):
        check(case, PipelineSchedule(case, tuple(schedules.run(case, lambda task: float(task.is_backward)))))


def test_simulate_fuse_draws_prints_json_and_refuses_wrong_values(tmp_path: Path) -> None:
    def simulated(*words: str, code: int = 0) -> str:
        return command(["simulate", *words], code).output

    assert "No schedule takes less than 24" in simulated("--fuse", "2x4", "--out", str(tmp_path))
    assert (tmp_path / "fused.png").stat().st_size > 10_000
    assert json.loads(simulated("--fuse", "4x8x0.5", "--json"))["schedules"]["serial"]["time"] == 49.5
    for wrong in ("4", "0x4", "4x8x0", "65x1"):
        assert "--fuse: must be" in simulated("--fuse", wrong, code=2)
    assert "JOB: must be given" in simulated(code=2)

"""Simulated serving: answers are complete, times add up, and where prefill apart pays."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from runs import command

from rlhfspec.simulator.serving import (
    Arrival,
    Placement,
    PromptSeen,
    ServingCosts,
    ServingTargets,
    arrivals,
    run,
    search,
)

COSTS = ServingCosts(
    step_seconds=8.8e-3, sequence_seconds=0.37e-3, prefill_seconds=0.5e-3, pause_seconds=0.01,
    prompts=[PromptSeen(tokens=500 + 20 * number, responses=[60 + 4 * number]) for number in range(16)],
)  # fmt: skip


@given(
    placement=st.tuples(st.integers(1, 5), st.integers(0, 4), st.sampled_from([7, 64, 4096])).filter(
        lambda drawn: drawn[1] < drawn[0]
    ),
    rate=st.floats(0.1, 100.0),
    rows=st.integers(1, 64),
)
@settings(max_examples=60, deadline=None)
def test_each_request_is_answered_once_and_no_sooner_than_its_own_steps(
    placement: tuple[int, int, int], rate: float, rows: int
) -> None:
    came = arrivals(COSTS, rate, 60, seed=1)
    done = run(COSTS, Placement(*placement), came, rows=rows)
    assert sorted(each.arrived for each in done) == [each.at for each in came]
    assert sorted(each.length for each in done) == sorted(each.responses[0] for each in came)
    alone = COSTS.seconds(1, 0)
    for each in done:
        assert each.first >= 500 * COSTS.prefill_seconds - 1e-9
        assert each.per_token >= alone * (1 - 2 / each.length)  # a move in mid-step rounds by a token


def test_a_sequence_handed_over_waits_for_no_chunks_of_others() -> None:
    came = [Arrival(0.0, 100, (101,)), Arrival(0.3, 2000, (11,))]
    costs = COSTS.model_copy(update={"pause_seconds": 0.1})
    together, apart = (
        next(each for each in run(costs, placement, came, rows=8) if not each.arrived)
        for placement in (Placement(1, 0, chunk=2000), Placement(2, 1, chunk=2000))
    )
    assert apart.per_token == pytest.approx(COSTS.seconds(1, 0) + 0.1 / 100, rel=0.01)  # it stands still for a pause
    assert together.per_token == pytest.approx(COSTS.seconds(1, 0) + 2000 * COSTS.prefill_seconds / 100, rel=0.01)


def test_each_chunk_costs_a_step() -> None:
    came = [Arrival(0.0, 512, (1,))]
    whole, in_chunks = (run(COSTS, Placement(1, 0, chunk=chunk), came, rows=1)[0].first for chunk in (512, 32))
    assert in_chunks - whole == pytest.approx(15 * COSTS.step_seconds)


SHORT = COSTS.model_copy(
    update={
        "step_seconds": 0.6e-3,
        "sequence_seconds": 0.52e-3,
        "prompts": [PromptSeen(tokens=48 + 2 * n, responses=[64 + 8 * n]) for n in range(16)],
    }
)


@pytest.mark.parametrize(("costs", "token_ms", "is_apart"), [(SHORT, 60, False), (COSTS, 20, True)])
def test_apart_wins_for_long_prompts_under_tight_targets_but_makes_no_stage_faster(
    costs: ServingCosts, token_ms: float, is_apart: bool
) -> None:
    targets = ServingTargets(first_seconds=2.0, token_seconds=token_ms / 1e3)
    found = search(costs, targets, num_generators=4, rows=64, seeds=[1])
    assert bool(found[0].placement.num_prefilling) == is_apart
    [together] = [each for each in found if not each.placement.num_prefilling]
    assert together.stage_seconds == min(each.stage_seconds for each in found)


def test_simulate_serve_prints_draws_and_refuses_other_files(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(COSTS.model_dump_json())
    words = ["simulate", "--serve", str(tmp_path), "--seeds", "1", "--plot", str(tmp_path)]
    assert "apart, 1 + 1" in command(words, 0).output
    assert (tmp_path / "served.png").stat().st_size > 10_000
    [first, second] = json.loads(command([*words, "--json"], 0).output)["placements"]
    assert first["goodput"] >= second["goodput"]
    assert "No such file" in command(["simulate", "--serve", str(tmp_path / "none")], 2).output
    file.write_text(file.read_text().replace('"step_seconds":', '"step_second":'))
    assert "step_seconds: Field required" in command(words, 2).output

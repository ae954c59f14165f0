"""Every sample of a run has a trace, moved or not, and tracing changes no curve."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from advice import Adviser
from runs import command, train
from traced_moves import check_traces, told_by_trace
from typer.testing import CliRunner, Result

from rlhfspec.cli.main import app
from rlhfspec.messages.records import Moved
from rlhfspec.rebalancer.knowledge import FleetKnowledge
from rlhfspec.rebalancer.service import RebalancerService
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.telemetry.folder import read_spans
from rlhfspec.telemetry.read import lives

TWO = ("roles.generator.workers=2", "training.steps=3")
LONG = ("generation.maxTokens=256", "generation.ignoreEos=true", "generation.kvCacheTokens=65536")
LONG += ("rebalance.intervalSeconds=0.02",)


@pytest.fixture
def moved_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    adviser = Adviser(Path("none"), seed=1, every_seconds=0.0)
    hear = FleetKnowledge.moved

    def moved(knowledge: FleetKnowledge, moved: Moved, now: float) -> None:
        adviser.heard(moved)
        hear(knowledge, moved, now)

    async def plan(service: Any) -> None:
        adviser.loads = {worker: each.load for worker, each in service.knowledge._generators.items()}
        for move in adviser.advice("letters"):
            await service._bus.publish(move)

    monkeypatch.setattr(FleetKnowledge, "moved", moved)
    monkeypatch.setattr(RebalancerService, "_plan", plan)


def trace(*arguments: str) -> str:
    return command(["trace", *arguments], 0).output


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("speculation", ["off", "suffix"])
def test_moved_samples_have_spans_for_stays_and_moves(job_file: Path, moved_at_random: None, speculation: str) -> None:
    steps = "training.steps=8"  # a quick machine has few moves a step
    train(job_file, "run", *TWO, *LONG, steps, f"generation.speculation.mode={speculation}")
    run = job_file.parent / "run"
    num_moves, most = check_traces(run)
    print(f"{num_moves} moves, at most {most} of one sample")
    assert num_moves >= 20
    assert most >= 2, "one came back"
    check_what_is_shown(run)


def check_what_is_shown(run: Path) -> None:
    ids = [f"letters/{step}/{prompt}/{replica}" for step in (2, 3) for prompt in range(3) for replica in range(3)]
    told = {id: told_by_trace(trace(str(run), id, "--json")) for id in ids}
    chains = {id: [span["worker"] for span in spans if span["name"] == "generation"] for id, spans in told.items()}
    id, workers = max(((id, chain) for id, chain in chains.items() if len(chain) < 6), key=lambda each: len(each[1]))
    assert len(workers) > 1
    shown = trace(str(run), id)
    for source, destination in pairwise(workers):
        assert f"generator {source} -> {destination}" in shown
    [row] = [line for line in trace(str(run), "--slowest", "9", "--step", id.split("/")[1]).splitlines() if id in line]
    assert row.rstrip().endswith(f"generator {', '.join(map(str, workers))}")


NAMES = {"prompt", "generation", "reward", "reference", "training"}


def traced(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["trace", *arguments])


def test_every_sample_of_a_run_has_its_whole_life_and_traces_change_no_curve(job_file: Path) -> None:
    evaluated = ("evaluation.everySteps=2", "evaluation.numPrompts=2")
    with_traces = train(job_file, "run", *evaluated, "roles.generator.workers=2")
    run = job_file.parent / "run"
    folder = RunFolder(run)
    for life in lives(read_spans(run)):
        assert all(span.ended >= span.began >= 0 for span in life.spans)
        if "/evaluation-" in life.sample:
            assert {span.name for span in life.spans} == {"prompt", "generation", "reward", "evaluation"}
        else:
            assert {span.name for span in life.spans} == NAMES
        parents = {span.id for span in life.spans} | {""}
        assert all(span.parent in parents for span in life.spans)
    ids = {line["id"] for line in [*folder.samples(), *folder.evaluation_samples()]}
    assert {life.sample for life in lives(read_spans(run))} == ids
    told = json.loads(traced(str(run), "letters/2/1/0", "--json").output)
    assert {span["name"] for span in told[0]["spans"]} == NAMES
    assert len({span["trace"] for span in told[0]["spans"]}) == 1
    assert "letters/3/" in traced(str(run), "--slowest", "2").output
    assert train(job_file, "without", *evaluated, "observability.traces=false") == with_traces
    assert not (job_file.parent / "without" / "traces").exists()
    refused = traced(str(job_file.parent / "without"), "letters/2/1/0")
    assert refused.exit_code == 2
    assert refused.output.startswith("RUN: it holds no traces: they are written while a job runs, with observability.")
    assert len(refused.output.splitlines()) == 1

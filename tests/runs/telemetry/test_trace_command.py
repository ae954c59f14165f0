"""`rlhfspec trace` shows every sample of whole runs, and tracing changes no curve."""

import json
from pathlib import Path

import pytest
from runs import invoke, train
from typer.testing import CliRunner, Result

from rlhfspec.cli.main import app
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.telemetry.folder import read_spans
from rlhfspec.telemetry.read import lives

NAMES = {"prompt", "generation", "reward", "reference", "training"}


def trace(*arguments: str) -> Result:
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
    told = json.loads(trace(str(run), "letters/2/1/0", "--json").output)
    assert {span["name"] for span in told[0]["spans"]} == NAMES
    assert len({span["trace"] for span in told[0]["spans"]}) == 1
    assert "letters/3/" in trace(str(run), "--slowest", "2").output
    assert train(job_file, "without", *evaluated, "observability.traces=false") == with_traces
    assert not (job_file.parent / "without" / "traces").exists()
    refused = trace(str(job_file.parent / "without"), "letters/2/1/0")
    assert refused.exit_code == 2
    assert refused.output.startswith("RUN: it holds no traces: they are written while a job runs, with observability.")
    assert len(refused.output.splitlines()) == 1


def test_an_endpoint_is_a_url_and_needs_its_package(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = invoke(job_file, "out", "observability.otlpEndpoint=localhost:4317")
    assert (refused.exit_code, "spec.observability.otlpEndpoint" in refused.output) == (2, True)
    monkeypatch.setattr("rlhfspec.runs.folder.trackers.find_spec", lambda name: None)
    refused = invoke(job_file, "out", "observability.otlpEndpoint=http://localhost:4317", code=2)
    assert "pip install 'rlhfspec[processes]'" in refused.output

"""Benchmark workers that answer, hang, fail and are compared."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_models import untrained_pair_in
from rich.console import Console
from typer.testing import CliRunner

from rlhfspec.bench.generating import report, run
from rlhfspec.bench.generating.plot import plot
from rlhfspec.bench.generating.results import Results, to_json
from rlhfspec.bench.generating.run import Benchmark, BenchSettings
from rlhfspec.bench.worker import RIVALS, Worker, WorkerFailed
from rlhfspec.cli import main as cli
from rlhfspec.tiny import models as tiny_models

# Answers instantly; its speed depends on the mode, its digest on the seeds (and on the mode, when told to cheat).
SCRIPTED = """
import sys, json, hashlib
sys.path.insert(0, {rivals!r})
from serve import serve
SPEEDS = {{"plain": 100.0, "adaptive": 400.0, "static:model-d2": 300.0, "hf": 50.0}}
def load(arguments):
    return {{"loaded": {{"arithmetic": "amx", "costs": {{"target": {{"rows": [1, 2], "seconds": [0.01, 0.02]}}}},
                         "static": ["model-d2"]}}}}
def run(arguments):
    print("noise on standard output")
    num_tokens = sum(arguments["max_tokens"])
    digest = str(arguments["seeds"]) + (arguments["mode"] if {cheat!r} in arguments["mode"] else "")
    selector = {{"share_of_step": 0.002, "cost_errors": {{"step": 0.1}}, "calibration_error": 0.02,
                 "plans": {{"plain": 3}}}}
    line = (arguments["scenario"], arguments["mode"], str(arguments["max_tokens"][0]))
    open({log!r}, "a").write(" ".join(line) + "\\n")
    return {{"seconds": num_tokens / SPEEDS[arguments["mode"]], "num_tokens": num_tokens,
             "accepted_per_verification": 1.5, "digest": digest, "selector": selector}}
serve({{"load": load, "run": run}})
"""


def test_worker_answers_reports_errors_and_ends(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    rivals = str(RIVALS)
    script.write_text(
        f"import sys; sys.path.insert(0, {rivals!r})\n"
        "from serve import serve\n"
        "import os, sys\n"
        "def boom(arguments): raise ValueError('no such model')\n"
        "def die(arguments): print('last words', file=sys.stderr, flush=True); os._exit(3)\n"
        "def echo(arguments): print('chatter'); return arguments\n"
        "serve({'boom': boom, 'die': die, 'echo': echo})\n"
    )
    with Worker.start([sys.executable, str(script)], num_threads=1) as worker:
        assert worker.ask("echo", value=[1, 2]) == {"value": [1, 2]}
        with pytest.raises(WorkerFailed, match="no such model"):
            worker.ask("boom")
        assert worker.ask("echo", value="still here") == {"value": "still here"}
        with pytest.raises(WorkerFailed, match="last words"):
            worker.ask("die")


def test_worker_that_hangs_is_ended() -> None:
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    with (
        Worker.start(command, num_threads=1, patience_seconds=0.2) as worker,
        pytest.raises(WorkerFailed, match="exit code -9"),
    ):
        worker.ask("load")


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the engine and Hugging Face by the script; return a function that runs the benchmark."""
    monkeypatch.chdir(tmp_path)  # where there is no .venv-vllm

    def start(*, cheat: str = "nobody", **options: Any) -> tuple[Results, list[str], list[str]]:
        script, log = tmp_path / "scripted.py", tmp_path / "log"
        log.write_text("")
        rivals = str(RIVALS)
        script.write_text(SCRIPTED.format(rivals=rivals, cheat=cheat, log=str(log)))
        monkeypatch.setattr(run, "our_command", lambda: [sys.executable, str(script)])
        monkeypatch.setattr(run, "hf_command", lambda: [sys.executable, str(script)])
        clock = options.pop("clock", lambda: 0.0)
        settings = BenchSettings(target="t", draft="d", scenarios=("batch-1", "batch-4"), num_tokens=64, **options)
        said: list[str] = []
        return Benchmark(settings, said.append, clock).run(), log.read_text().splitlines(), said

    return start


def test_run_interleaves_warms_up_and_reports(scripted: Any) -> None:
    results, log, said = scripted(threads=(1, 2), repeats=2)
    modes = ["plain", "adaptive", "static:model-d2", "hf"]
    assert [row.mode for row in results.rows] == modes * 4
    assert [row.tokens_per_second for row in results.rows][:4] == [100.0, 400.0, 300.0, 50.0]
    first = log[: len(log) // 2]  # one thread
    timed = [line for line in first if line.endswith(" 64")]
    assert len(first) - len(timed) == 8  # one warm-up for each mode and scenario
    assert [line.split()[0] for line in timed] == ["batch-1"] * 4 + ["batch-4"] * 4 + ["batch-1"] * 4 + ["batch-4"] * 4
    assert [line.split()[1] for line in timed][:4] == modes
    second = [line.split()[1] for line in timed][8:12]
    assert second != modes, "in another order"
    assert sorted(second) == sorted(modes)
    assert len(results.skipped) == 2
    assert all("make setup-vllm" in line for line in results.skipped)
    assert any("batch-4, repetition 2: plain 100, adaptive 400" in line for line in said)
    assert all(bar.holds for bar in results.bars)
    rows = json.loads(to_json({"english": results}))["english"]["rows"]
    assert {"scenario", "mode", "tokens_per_second", "repeats", "accepted_per_verification"} <= rows[0].keys()


def test_run_notices_a_mode_that_changes_tokens(scripted: Any) -> None:
    results, _, _ = scripted(cheat="adaptive", threads=(1, 2), modes=("plain", "adaptive"), repeats=1)
    broken = [bar for bar in results.bars if not bar.holds]
    assert {bar.name for bar in broken} == {"same tokens and log-probs in every mode", "same with 1 and 2 threads"}
    assert all("adaptive differ" in bar.found for bar in broken)


def test_run_stops_in_time(scripted: Any) -> None:
    now, later = iter(range(1000)), iter(range(1000))
    results, log, _ = scripted(
        threads=(1,), repeats=50, modes=("plain", "adaptive"), budget_seconds=12.0, clock=lambda: float(next(now))
    )
    assert 4 <= len(log) < 24
    assert {row.scenario for row in results.rows} == {"batch-1", "batch-4"}
    late, _, _ = scripted(
        threads=(1,), modes=("plain", "adaptive"), budget_seconds=3.0, clock=lambda: float(next(later))
    )
    assert "adaptive in batch-4: no time left" in late.skipped


def test_run_goes_on_without_a_rival_that_fails(scripted: Any, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no module named vllm >&2; exit 1\n")
    python.chmod(0o755)
    results, _, _ = scripted(threads=(1,), repeats=1, modes=("plain", "vllm-plain"), vllm_python=str(python))
    assert [row.mode for row in results.rows] == ["plain"] * 2
    assert "vllm-plain: the worker ended (exit code 1)" in results.skipped[0]


def test_table_and_plot(scripted: Any, tmp_path: Path) -> None:
    results, _, _ = scripted(threads=(1, 2), repeats=1)
    console = Console(width=160, record=True, file=(tmp_path / "screen").open("w"))
    report.show(results, console)
    text = console.export_text()
    for part in ("400 (1.50)", "vllm-draft: no vLLM here", "bars: ", "✓", "10.00", "20.00", "fast bfloat16"):
        assert part in text
    console.file.close()
    plot(results, tmp_path / "speeds.png")
    assert (tmp_path / "speeds.png").stat().st_size > 10_000


@pytest.fixture(scope="module")
def untrained_pair(tmp_path_factory: pytest.TempPathFactory) -> tiny_models.TinyModels:
    return untrained_pair_in(tmp_path_factory.mktemp("models"))


def test_benchmark_of_engine_and_hugging_face(untrained_pair: tiny_models.TinyModels, tmp_path: Path) -> None:
    arguments = [
        "bench", "generate", "--model", str(untrained_pair.wide), "--draft", str(untrained_pair.draft),
        "--threads", "1", "--modes", "plain,adaptive,static:model-d4,hf", "--scenarios", "batch-4",
        "--repeats", "2", "--tokens", "12",
        "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"),
    ]  # fmt: skip
    outcome = CliRunner().invoke(cli.app, arguments)
    assert outcome.exit_code == 0, outcome.output
    results = json.loads((tmp_path / "out.json").read_text())["english"]
    assert [row["mode"] for row in results["rows"]] == ["plain", "adaptive", "static:model-d4", "hf"]
    assert all(row["tokens_per_second"] > 0 for row in results["rows"])
    assert {bar["name"]: bar["holds"] for bar in results["bars"]}["same tokens and log-probs in every mode"]
    assert results["costs"]["1"]["target"]["rows"][0] == 1
    assert (tmp_path / "out.png").exists()

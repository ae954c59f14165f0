"""Benchmarks in separate processes: workers that answer, hang and fail, moves, and a step of a run."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bench_models import untrained_pair_in
from rich.console import Console
from runs import command

from rlhfspec.bench.generating import report, run
from rlhfspec.bench.generating.plot import plot
from rlhfspec.bench.generating.results import Results, to_json
from rlhfspec.bench.generating.run import Benchmark, BenchSettings
from rlhfspec.bench.moving.migrating import plot as migrate_plot, report as migrate_report
from rlhfspec.bench.moving.migrating.migrate import MigrateBenchmark, MigrateSettings
from rlhfspec.bench.moving.pair import Pair
from rlhfspec.bench.moving.rebalancing import plot as rebalance_plot, report as rebalance_report
from rlhfspec.bench.moving.rebalancing.arms import ARMS, OURS
from rlhfspec.bench.moving.rebalancing.rebalance import RebalanceBenchmark, RebalanceSettings
from rlhfspec.bench.moving.rebalancing.rebalancer import RunsRebalancer
from rlhfspec.bench.moving.rebalancing.workloads import stages
from rlhfspec.bench.stepping import step as bench_step
from rlhfspec.bench.stepping.step import StepSettings
from rlhfspec.bench.worker import RIVALS, Worker, WorkerFailed
from rlhfspec.messages.records import Move, Moved
from rlhfspec.tiny import models as tiny_models, random_model
from rlhfspec.tiny.tokenizer import VOCAB_SIZE, hugging_face_tokenizer

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
        script.write_text(SCRIPTED.format(rivals=str(RIVALS), cheat=cheat, log=str(log)))
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
    assert len(results.skipped) == 3
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
    late = scripted(threads=(1,), modes=("plain", "adaptive"), budget_seconds=3.0, clock=lambda: float(next(later)))[0]
    assert "adaptive in batch-4: no time left" in late.skipped


def test_run_goes_on_without_a_rival_that_fails(scripted: Any, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no module named vllm >&2; exit 1\n")
    python.chmod(0o755)
    results, _, _ = scripted(threads=(1,), repeats=1, modes=("plain", "vllm-plain"), vllm_python=str(python))
    assert [row.mode for row in results.rows] == ["plain"] * 2
    assert "vllm-plain: the worker ended (exit code 1)" in results.skipped[0]


def test_results_are_shown_as_a_table_and_a_plot(scripted: Any, tmp_path: Path) -> None:
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
    command(arguments, 0)
    results = json.loads((tmp_path / "out.json").read_text())["english"]
    assert [row["mode"] for row in results["rows"]] == ["plain", "adaptive", "static:model-d4", "hf"]
    assert all(row["tokens_per_second"] > 0 for row in results["rows"])
    assert {bar["name"]: bar["holds"] for bar in results["bars"]}["same tokens and log-probs in every mode"]
    assert results["costs"]["1"]["target"]["rows"][0] == 1
    assert (tmp_path / "out.png").exists()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    made = random_model("llama", seed=0, vocab_size=VOCAB_SIZE)
    made.config.max_position_embeddings = 2048  # it is so fast that it would end before it is moved
    made.save_pretrained(folder)
    hugging_face_tokenizer().save_pretrained(folder)
    return str(folder)


def shown(renderable: Any) -> str:
    console = Console(width=250, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


class Hasty:
    """Order the longest of generator 0 as soon as anything has ended, and again until one has moved."""

    def __init__(self, now: float, limit: int, earlier: Sequence[int], longest: Sequence[int]) -> None:
        self._real = RunsRebalancer(now, limit, earlier)
        self._longest, self._has_moved, self._asked = longest, False, set[str]()
        self.loaded = self._real.loaded
        self._stage = ""

    def finished(self, sample_id: str, prompt: tuple[int, ...], length: int) -> None:
        self._real.finished(sample_id, prompt, length)
        self._stage = sample_id.split("/")[0]

    def moved(self, moved: Moved, now: float) -> None:
        self._real.moved(moved, now)
        self._asked.discard(moved.id)
        self._has_moved |= moved.how != "kept"

    def moves(self, now: float) -> list[Move]:
        if self._has_moved or not self._stage:
            return list(self._real.moves(now))
        if self._asked:
            return []
        names = [f"{self._stage}/{number}/{number}" for number in self._longest]
        self._asked = {f"{name}/{now}" for name in names}
        return [Move(id=f"{name}/{now}", job="bench", sample_id=name, source=0, destination=1, gain_seconds=1.0,
                     reason="hasty") for name in names]  # fmt: skip


# A generator whose engine makes no step between the first end of a stage and the first move from it.
PATIENT = """
from rlhfspec.bench.moving import __main__, generator
class Patient(generator.Generator):
    _is_moved_from = _has_finished = False
    async def _on_stage(self, *, name, **rest):
        self._is_moved_from, self._has_finished = name == {stage!r} and not self._number, False
        await super()._on_stage(name=name, **rest)
    def _tell(self, name, **what):
        super()._tell(name, **what)
        self._has_finished |= name == "finished"
        self._is_moved_from &= name != "moved" or what["how"] == "kept"
    def _step(self):
        if self._is_moved_from and self._has_finished:
            self._wake.wait(0.01)
        else:
            super()._step()
generator.Generator = Patient
__main__.main()
"""


def patient_command(number: int, core: int) -> list[str]:
    stage = f"run-{ARMS.index(OURS) + 1}"
    return [sys.executable, "-c", PATIENT.format(stage=stage), str(number), str(core)]


@pytest.mark.timeout(600)
@pytest.mark.whole("a benchmark of generators that are processes")
def test_rebalance_runs_every_arm_with_same_tokens(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pair, "start", partial(Pair.start, patient_command))
    once: dict[str, Any] = {"sizes": (1, 8), "seeds": 1, "repeats": 1, "scale": 0.3}
    settings = RebalanceSettings(model=model, draft=model, workloads=("skew",), decoding=("adaptive",), **once)
    said: list[str] = []
    lengths = stages("skew", 1, 0.3)[0].lengths
    hasty = partial(Hasty, longest=sorted(range(len(lengths)), key=lengths.__getitem__)[-6:])
    results = RebalanceBenchmark(settings, said.append, make_rebalancer=hasty).run()
    [stage] = results.stages
    assert set(stage.runs) == {"dealt", "pulled", "ours", "clairvoyant"} <= set(stage.predicted)
    assert all(run.seconds == max(run.ends) > 0 for runs in stage.runs.values() for run in runs)
    [ours] = stage.runs["ours"]
    assert ours.moves, ours.kept
    most = {arm: max(count for changes in runs[0].active for _, count in changes) for arm, runs in stage.runs.items()}
    assert most["dealt"] > 16
    assert most["pulled"] <= 16
    text = shown(rebalance_report.render(results))
    assert "skew" in text
    assert "dealt / ours" in text
    assert json.loads(results.to_json())["rows"][0]["seconds"].keys() >= {"dealt", "ours", "ideal"}
    assert str(tmp_path) not in results.to_json()
    rebalance_plot.plot(results, tmp_path / "rebalance.png")
    assert (tmp_path / "rebalance.png").stat().st_size > 10_000


@pytest.mark.whole("a benchmark of generators that are processes")
def test_migrate_measures_moves_there_and_back(model: str, tmp_path: Path) -> None:
    settings = MigrateSettings(model=model, draft=model, links=("tcp",), tokens=(128,), decoding=("plain",),
                               repeats=2, moves_per_stage=2, link_rounds=0)  # fmt: skip
    results = MigrateBenchmark(settings, lambda _: None).run()
    assert [(cell.link, len(cell.moves)) for cell in results.cells] == [("tcp", 2)]
    for cell in results.cells:
        assert cell.prefill_gap > 0
        for move in cell.moves:
            assert move.num_bytes > 0
            assert min(move.pause, move.gap, move.seconds, move.step) > 0
    assert "an engine held" in shown(migrate_report.render(results))
    written = json.loads(results.to_json())
    assert {"pause", "gap", "cpu_per_mb", "break_even_tokens"} <= written["cells"][0]["medians"].keys()
    migrate_plot.plot(results, tmp_path / "migrate.png")
    assert (tmp_path / "migrate.png").stat().st_size > 10_000


def test_a_generator_that_dies_ends_the_benchmark_with_its_reason() -> None:
    dying = [sys.executable, "-c", "raise SystemExit('no model is nowhere')"]
    with Pair.start(lambda number, core: dying) as pair, pytest.raises(WorkerFailed, match="no model is nowhere"):
        pair.load(target="nowhere", draft=None, link="shm")


SETTINGS = StepSettings(model="m/target-1", draft="m/draft-1", steps=2, repeats=3, num_tokens=8)


def test_our_side_runs_a_job_and_generates_every_token_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    random_model("llama", seed=0, vocab_size=VOCAB_SIZE).save_pretrained(folder)
    hugging_face_tokenizer().save_pretrained(folder)
    settings = StepSettings(
        model=str(folder), draft=str(folder), num_tokens=8, steps=1, prompts_per_step=2, samples_per_prompt=2
    )
    warm_up, step = bench_step.measure_plain(replace(settings, num_threads=1, lora_rank=2))
    assert warm_up.num_tokens == step.num_tokens == 2 * 2 * 8
    assert 0 < step.seconds < warm_up.seconds + 60
    assert 2e8 < step.peak_bytes < 4e9
    assert {"generation", "reference", "training"} <= {name for name, spent in step.by_stage.items() if spent > 0}


def test_our_side_says_why_a_run_failed(tmp_path: Path) -> None:
    settings = replace(SETTINGS, model=str(tmp_path / "missing"), draft=str(tmp_path / "missing"))
    with pytest.raises(WorkerFailed, match="exit code 2"):
        bench_step.measure_plain(settings)

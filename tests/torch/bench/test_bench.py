"""The benchmark: scenarios, workers, bars, the run around them, table, plot, demo. Workers are scripted or tiny."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_models import untrained_pair_in
from typer.testing import CliRunner

from rlhfspec.bench import trees
from rlhfspec.bench.bars import bars_of_generation as bars
from rlhfspec.bench.bars import bars_of_learnt
from rlhfspec.bench.draining.batch import DrainingStep, Trace, drain_and_watch
from rlhfspec.bench.draining.plot import draw
from rlhfspec.bench.drifting import drift
from rlhfspec.bench.drifting import report as drift_report
from rlhfspec.bench.drifting.drift import DriftResults, DriftSettings, DriftStep, bars_of
from rlhfspec.bench.generating.ours import OurWorker, requests_of
from rlhfspec.bench.generating.results import ResultRow, Results
from rlhfspec.bench.generating.run import BenchSettings, find_vllm_python
from rlhfspec.bench.generating.scenarios import MAX_CONTEXT, PAIRS, SCENARIO_NAMES, scenarios
from rlhfspec.bench.processor import Processor
from rlhfspec.bench.ratios import against_best, paired
from rlhfspec.bench.worker import environment
from rlhfspec.cli import main as cli
from rlhfspec.engine import Completion, EngineStep
from rlhfspec.engine.base import SequenceStats
from rlhfspec.errors import InvalidRequest
from rlhfspec.tiny import models as tiny_models
from rlhfspec.tiny import perturbed, random_model
from rlhfspec.tiny.tokenizer import VOCAB_SIZE
from rlhfspec.training.checkpoint.shares import LEARNER
from rlhfspec.training.checkpoint.store import CheckpointStore

FAST = Processor(cpu="x", features=(), num_cores=2, system="", arithmetic="amx")
SLOW = replace(FAST, arithmetic="fma")


def test_scenarios_fit_the_engine_and_never_change() -> None:
    made = scenarios(SCENARIO_NAMES, num_tokens=128)
    assert made == scenarios(SCENARIO_NAMES, num_tokens=128)
    assert [s.num_sequences for s in made] == [1, 4, 8, 16, 32, 64, 64]
    for scenario in made:
        pairs = zip(scenario.prompts, scenario.max_tokens, strict=True)
        assert all(len(prompt) + length <= MAX_CONTEXT for prompt, length in pairs)
        assert len(set(scenario.seeds(0) + scenario.seeds(1))) == 2 * scenario.num_sequences
    tail = sorted(made[-1].max_tokens)
    assert tail[-1] > 3 * tail[len(tail) // 2]  # a tail worth its name
    with pytest.raises(InvalidRequest, match="scenarios"):
        scenarios(["batch-5"], num_tokens=8)


def test_workers_get_threads_and_malloc_settings() -> None:
    settings = environment(num_threads=1)
    assert settings["OMP_NUM_THREADS"] == "1"
    assert settings["VLLM_CPU_OMP_THREADS_BIND"].isdigit()
    assert int(settings["MALLOC_MMAP_THRESHOLD_"]) == 1 << 30


def test_settings_name_what_is_wrong() -> None:
    with pytest.raises(InvalidRequest, match="modes: must be among"):
        BenchSettings(target="t", draft="d", modes=("plain", "vlm"))
    with pytest.raises(InvalidRequest, match="at least one of ours"):
        BenchSettings(target="t", draft="d", modes=("hf",))
    with pytest.raises(InvalidRequest, match="vllm_python"):
        find_vllm_python("/nowhere/python")


def rows(scenario: str, **speeds: float) -> list[ResultRow]:
    return [
        ResultRow(
            scenario=scenario,
            mode=mode.replace("_", "-").replace("static-", "static:"),
            num_threads=2,
            tokens_per_second=speed,
            repeats=(speed,),
            accepted_per_verification=1.0,
            selector={"share_of_step": 0.009} if mode == "adaptive" else {},
        )
        for mode, speed in speeds.items()
    ]


@pytest.mark.parametrize(
    ("scenario", "machine", "adaptive", "holds"),
    [
        ("batch-1", FAST, 330.0, True),
        ("batch-1", FAST, 329.0, False),
        ("batch-1", SLOW, 250.0, True),
        ("batch-8", FAST, 100.0, True),
        ("batch-8", SLOW, 99.0, False),
        ("batch-16", SLOW, 100.0, True),
        ("batch-64", FAST, 104.0, False),
        ("batch-64", SLOW, 100.0, True),
        ("long-tail", FAST, 144.0, False),
        ("long-tail", SLOW, 130.0, True),
    ],
)
def test_bar_against_plain(scenario: str, machine: Processor, adaptive: float, holds: bool) -> None:
    results = Results(machine=machine, rows=tuple(rows(scenario, plain=100.0, adaptive=adaptive)))
    [bar] = [bar for bar in bars(results) if bar.name == "adaptive / plain"]
    assert bar.holds is holds


def test_bars_against_static_and_vllm() -> None:
    measured = rows(
        "batch-8", plain=100.0, adaptive=130.0, static_a=110.0, static_b=137.0, vllm_plain=101.0, vllm_draft=99.0
    )
    found = {bar.name: bar for bar in bars(Results(machine=FAST, rows=tuple(measured)))}
    assert not found["adaptive / best static (b)"].holds  # .949, wanted .97
    assert not found["plain / vllm-plain"].holds
    assert not found["adaptive / best vLLM (vllm-plain)"].holds  # 1.287
    better = replace(measured[1], tokens_per_second=133.0, repeats=(133.0,))
    found = {bar.name: bar for bar in bars(Results(machine=FAST, rows=(measured[0], better, *measured[2:])))}
    assert found["adaptive / best static (b)"].holds
    assert found["adaptive / best vLLM (vllm-plain)"].holds


def test_on_real_text_adaptive_only_has_to_beat_plain() -> None:
    results = Results(
        machine=FAST, rows=tuple(rows("batch-1", plain=100.0, adaptive=101.0)), settings={"pair": "library"}
    )
    [bar] = [bar for bar in bars(results) if bar.name == "adaptive / plain"]
    assert (bar.wanted, bar.holds) == (">= 1.00", True)


def test_a_drafter_that_learnt_has_bars_of_its_own() -> None:
    """Judged on each pair's own plain runs: the machine was twice as slow while the given draft was measured."""
    learnt, given = (
        Results(machine=FAST, rows=tuple(rows(scenario, plain=plain, adaptive=adaptive)), settings={"pair": pair})
        for pair, scenario, plain, adaptive in (
            ("learnt", "batch-4", 100.0, 139.0), ("library", "batch-4", 50.0, 57.0)
        )
    )  # fmt: skip
    [bar] = [bar for bar in bars(learnt) if bar.name == "adaptive / plain"]
    assert (bar.wanted, bar.holds) == (">= 1.40", False)
    [bar] = bars_of_learnt(learnt, given)
    assert (bar.wanted, bar.found.split()[0], bar.holds) == (">= 1.20", "1.22", True)
    assert bars_of_learnt(replace(learnt, rows=learnt.rows[:1]), given) == ()


def test_drift_is_judged_from_step_15_on_and_learning_over_the_whole_run() -> None:
    def row(mode: str, step: int, rate: float, spent: float = 0.0) -> DriftStep:
        return DriftStep(
            mode=mode, step=step, num_tokens=round(100 * rate), num_verifications=100, cpu_seconds=1.0,
            learning_seconds=spent, run_seconds=2.0,
        )  # fmt: skip

    steps = range(1, 21)
    frozen = [row("frozen", step, 4.0 if step < 15 else 3.0) for step in steps]
    learning = [row("learning", step, 4.0 if step < 15 else 3.6, spent=0.05) for step in steps]
    results = DriftResults(machine=None, rows=(*frozen, *learning))
    gain, share = bars_of(results)
    assert (gain.found.split()[0], gain.holds) == ("1.20", True)
    assert (share.found, share.holds) == ("2.5%", False)
    assert bars_of(DriftResults(machine=None, rows=tuple(frozen[:10]))) == ()


def test_policies_of_a_run_are_replayed_with_both_drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of three steps, made up; the tokens are compared where they are generated."""
    monkeypatch.setattr(drift, "_PROMPTS", 2)
    monkeypatch.setattr(drift, "_SAMPLES", 2)
    policy = random_model("llama", seed=1, vocab_size=VOCAB_SIZE)
    policy.save_pretrained(tmp_path / "policy")
    perturbed(policy, 0.3).save_pretrained(tmp_path / "draft")
    with CheckpointStore(tmp_path / "run" / "checkpoints", keep=3) as store:
        for step in (1, 2, 3):
            store.save(step, {LEARNER: {"policy": dict(perturbed(policy, 0.1 * step).state_dict())}})
    (tmp_path / "run" / "steps.jsonl").write_text('{"seconds": {"step": 5.0}}\n' * 3)
    settings = DriftSettings(
        job=tmp_path / "job.yaml", model=str(tmp_path / "policy"), draft=str(tmp_path / "draft"),
        speculation="model-d4", share=0.2,
    )  # fmt: skip
    found = DriftResults(machine=None, rows=tuple(drift.replayed(settings, tmp_path / "run", lambda line: None)))
    frozen, learning = found.of("frozen"), found.of("learning")
    assert [row.step for row in frozen] == [row.step for row in learning] == [1, 2, 3]
    assert [row.num_tokens for row in frozen] == [row.num_tokens for row in learning]
    assert sum(row.learning_seconds for row in learning) > 5 * sum(row.learning_seconds for row in frozen)
    drift_report.plot(found, tmp_path / "drift.png")
    assert (tmp_path / "drift.png").stat().st_size > 1000


def test_the_best_static_strategy_is_not_picked_after_the_fact() -> None:
    dice = random.Random(1)
    statics = {f"s{i}": [100.0 * dice.uniform(0.8, 1.2) for _ in range(6)] for i in range(12)}  # noise alone
    afterwards = max(statics.values(), key=sum)
    assert paired([100.0] * 6, afterwards).value < 0.95
    fair = against_best([100.0] * 6, statics)
    assert fair.value > paired([100.0] * 6, afterwards).value + 0.02
    assert fair.low < 1.0 < fair.high


def test_a_ratio_is_taken_within_each_repetition() -> None:
    slow_then_fast = paired([50.0, 200.0, 100.0], [40.0, 160.0, 80.0, 1.0])
    assert (slow_then_fast.low, slow_then_fast.value, slow_then_fast.high) == pytest.approx((1.25, 1.25, 1.25))
    assert against_best([1.0], {"a": [2.0], "b": [4.0]}).against == "b", "of one repetition, on itself"


def test_each_pair_has_prompts_of_its_own_text() -> None:
    [english], [library], [learnt] = (scenarios(["batch-4"], num_tokens=8, pair=pair) for pair in PAIRS)
    assert set(english.prompts).isdisjoint(library.prompts)
    assert learnt == library
    assert all(len(prompt) < 128 for prompt in scenarios(["batch-64"], num_tokens=8, pair="library")[0].prompts)


def test_bar_of_the_selectors_time() -> None:
    [row] = rows("batch-64", adaptive=1.0)
    slow = replace(row, selector={"share_of_step": 0.011})
    assert [bar.holds for bar in bars(Results(machine=FAST, rows=(row,))) if "share" in bar.name] == [True]
    assert [bar.holds for bar in bars(Results(machine=FAST, rows=(slow,)))] == [False]


def _calibration_error() -> float:
    return 0.01


class FakeEngine:
    """Commits one token a step for each sequence, two when it speculates. Tokens depend on seed and position only."""

    def __init__(self, *_: Any, **options: Any) -> None:
        explanation = SimpleNamespace(share_of_step=0.001, cost_errors={"step": 0.1}, decisions=())
        self.options = options
        self.speculation = SimpleNamespace(
            selector=SimpleNamespace(explain=lambda: explanation, start_totals=lambda: None),
            costs=SimpleNamespace(tables={}),
            acceptance=SimpleNamespace(calibration_error=_calibration_error),
        )
        runner = SimpleNamespace(config=SimpleNamespace(arithmetic="fma"))
        self.state = SimpleNamespace(target=SimpleNamespace(runner=runner))
        self.mode = "adaptive"
        self.groups: list[str] = []
        self._running: list[list[Any]] = []

    def set_speculation(self, speculation: str) -> None:
        self.mode = speculation
        kept = self.speculation.selector
        self.speculation.selector = SimpleNamespace(
            explain=kept.explain, start_totals=kept.start_totals, mode=speculation
        )

    def forget_kept(self) -> None:
        """It keeps nothing."""

    def submit(self, request: Any) -> None:
        self.groups.append(request.group)
        self._running.append([request, 0])

    def step(self) -> EngineStep:
        pace = 1 if self.mode == "off" else 2
        decoding = len(self._running)
        done = []
        for entry in self._running:
            entry[1] = min(entry[1] + pace, entry[0].params.max_tokens)
            if entry[1] == entry[0].params.max_tokens:
                done.append(_completion(entry[0]))
        self._running = [entry for entry in self._running if entry[1] < entry[0].params.max_tokens]
        return EngineStep(
            finished=tuple(done),
            num_decoding=decoding,
            num_prefill_tokens=0,
            num_verified_nodes=0 if pace == 1 else decoding,
            num_committed=pace * decoding,
            strategy="plain" if pace == 1 else f"model-d{decoding}",
            seconds=0.01,
        )


def _completion(request: Any) -> Completion:
    tokens = tuple((request.seed + position) % 7 for position in range(request.params.max_tokens))
    return Completion(
        id=request.id,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=tokens,
        log_probs=(-1.0,) * len(tokens),
        tempered_log_probs=(-1.0,) * len(tokens),
        weights_versions=(0,) * len(tokens),
        finish_reason="length",
        stats=SequenceStats(num_verifications=4, num_accepted=6),
    )


def test_our_worker_switches_modes_and_keeps_groups_fresh() -> None:
    worker = OurWorker(FakeEngine)
    loaded = worker.load(
        {"target": "t", "draft": "d", "dtype": "float32", "num_threads": 1, "max_sequences": 4, "max_context": 64}
    )["loaded"]
    assert loaded["arithmetic"] == "fma"
    assert "model-d4" in loaded["static"]
    [scenario] = scenarios(["batch-4"], num_tokens=8)
    request = {
        "scenario": "batch-4",
        "prompts": scenario.prompts,
        "max_tokens": scenario.max_tokens,
        "seeds": scenario.seeds(0),
    }
    plain = worker.run({"mode": "plain", **request})
    adaptive = worker.run({"mode": "adaptive", **request})
    assert worker._engine.mode == "adaptive"
    worker.run({"mode": "static:model-d4", **request})
    assert worker._engine.mode == "model-d4"
    assert plain["digest"] == adaptive["digest"]
    assert plain["digest"] != worker.run({"mode": "plain", **request, "seeds": scenario.seeds(1)})["digest"]
    assert adaptive["accepted_per_verification"] == 1.5
    assert adaptive["selector"]["cost_errors"] == {"step": 0.1}
    assert len(set(worker._engine.groups)) == len(worker._engine.groups)
    json.dumps(adaptive)


def test_draining_batch_is_watched_and_drawn(tmp_path: Path) -> None:
    [scenario] = scenarios(["long-tail"], num_tokens=24)
    arguments = {"prompts": scenario.prompts, "max_tokens": scenario.max_tokens, "seeds": scenario.seeds(0)}
    traces = {}
    for mode, speculation in (("plain", "off"), ("adaptive", "adaptive")):
        engine = FakeEngine()
        engine.set_speculation(speculation)
        seen: list[int] = []
        traces[mode] = drain_and_watch(
            engine, requests_of(arguments, mode), mode, lambda trace, seen=seen: seen.append(len(trace.steps))
        )
        assert seen == list(range(1, len(seen) + 1))
    plain, adaptive = traces["plain"], traces["adaptive"]
    assert plain.digest == adaptive.digest
    assert [c.id for c in plain.completions] == [f"plain/{index}" for index in range(64)]
    assert plain.seconds == pytest.approx(0.01 * max(scenario.max_tokens))
    assert adaptive.tokens_per_second > 1.5 * plain.tokens_per_second
    assert adaptive.strategies_by_activity()[0] == (64, 33, "model-d64")
    draw(plain, adaptive, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size > 20_000


def test_bands_of_activity_halve_down_to_one() -> None:
    actives = [8, 8, 7, 5, 4, 3, 1, 1]
    steps = [
        DrainingStep(seconds=i, num_active=n, num_tokens=n, num_verified_nodes=0, strategy="a" if n > 4 else "b")
        for i, n in enumerate(actives)
    ]
    bands = Trace(mode="adaptive", steps=steps).strategies_by_activity()
    assert bands == [(8, 5, "a"), (4, 3, "b"), (1, 1, "b")]


@pytest.fixture(scope="module")
def untrained_pair(tmp_path_factory: pytest.TempPathFactory) -> tiny_models.TinyModels:
    return untrained_pair_in(tmp_path_factory.mktemp("models"))


def test_bench_names_wrong_options(tmp_path: Path) -> None:
    runner = CliRunner()
    assert "go together" in runner.invoke(cli.app, ["bench", "generate", "--model", "x"]).output
    missing = runner.invoke(cli.app, ["bench", "generate", "--model", "x", "--draft", "y"])
    assert missing.exit_code == 2
    assert "config.json" in missing.output
    (tmp_path / "config.json").write_text("{}")
    folder = str(tmp_path)
    wrong = runner.invoke(cli.app, ["bench", "generate", "--model", folder, "--draft", folder, "--modes", "fast"])
    assert wrong.exit_code == 2
    assert "modes" in wrong.output


def test_explain_shows_predicted_and_real(untrained_pair: tiny_models.TinyModels) -> None:
    arguments = [
        "bench", "explain", "--model", str(untrained_pair.wide), "--draft", str(untrained_pair.draft),
        "--batch", "4", "--tokens", "16", "--threads", "1", "--decisions", "3",
    ]  # fmt: skip
    outcome = CliRunner().invoke(cli.app, arguments)
    assert outcome.exit_code == 0, outcome.output
    for part in (
        "decisions: predicted → real",
        "the plans as they looked last",
        "expected calibration error",
        "selector's share",
    ):
        assert part in outcome.output


def test_trees_command_compares_chains_and_budgets(
    untrained_pair: tiny_models.TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "NODES", (4,))
    arguments = [
        "bench", "trees", "--model", str(untrained_pair.wide), "--draft", str(untrained_pair.draft),
        "--batch", "4", "--tokens", "16",
    ]  # fmt: skip
    outcome = CliRunner().invoke(cli.app, arguments)
    assert outcome.exit_code == 0, outcome.output
    assert "-n4" in outcome.output
    gain = trees.TreeGain(num_nodes=32, chain_tokens=10.0, tree_tokens=10.9, tree="x")
    assert (gain.holds, replace(gain, tree_tokens=11.0).holds, replace(gain, num_nodes=8).holds) == (False, True, True)


def test_demo_draws_its_picture(
    untrained_pair: tiny_models.TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_models, "ensure", lambda *_, **__: untrained_pair)
    picture = tmp_path / "pictures" / "demo.png"
    arguments = ["bench", "drain", "--output", str(picture), "--tokens", "8", "--threads", "1", "--dtype", "float32"]
    outcome = CliRunner().invoke(cli.app, arguments)
    assert outcome.exit_code == 0, outcome.output
    assert "64 of 64 sequences" in outcome.output
    assert "the strategy as the batch drained" in outcome.output
    assert picture.exists()


def test_demo_stops_cleanly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_models, "ensure", interrupted)
    outcome = CliRunner().invoke(cli.app, ["bench", "drain"])
    assert outcome.exit_code == 130
    assert "Traceback" not in outcome.output


def test_version_and_help() -> None:
    runner = CliRunner()
    assert runner.invoke(cli.app, ["--version"]).output.startswith("rlhfspec 0.")
    help_text = runner.invoke(cli.app, ["--help"]).output
    assert all(name in help_text for name in ("run", "bench", "tiny"))

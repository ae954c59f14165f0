"""The benchmark: scenarios, workers, bars, runs, table, plot, demo, with scripted or tiny workers."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from bench_models import untrained_pair_in
from typer.testing import CliRunner

from rlhfspec.bench import trees
from rlhfspec.bench.bars import bars_of_generation as bars
from rlhfspec.bench.bars import bars_of_learnt
from rlhfspec.bench.draining.batch import DrainingStep, Trace
from rlhfspec.bench.drifting import drift
from rlhfspec.bench.drifting import report as drift_report
from rlhfspec.bench.drifting.drift import DriftResults, DriftSettings, DriftStep, bars_of
from rlhfspec.bench.generating.results import ResultRow, Results
from rlhfspec.bench.generating.run import BenchSettings, find_vllm_python
from rlhfspec.bench.generating.scenarios import MAX_CONTEXT, PAIRS, SCENARIO_NAMES, scenarios
from rlhfspec.bench.processor import Processor
from rlhfspec.bench.ratios import against_best, paired
from rlhfspec.cli import main as cli
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
    ("scenario", "machine", "pair", "adaptive", "holds"),
    [
        ("batch-1", FAST, "english", 330.0, True),
        ("batch-1", FAST, "english", 329.0, False),
        ("batch-1", SLOW, "english", 250.0, True),
        ("batch-8", SLOW, "english", 99.0, False),
        ("batch-64", FAST, "english", 104.0, False),
        ("batch-64", SLOW, "english", 100.0, True),
        ("long-tail", FAST, "english", 144.0, False),
        ("long-tail", SLOW, "english", 130.0, True),
        ("batch-1", FAST, "library", 101.0, True),  # on real text it only has to beat plain
    ],
)
def test_bar_against_plain(scenario: str, machine: Processor, pair: str, adaptive: float, holds: bool) -> None:
    measured = tuple(rows(scenario, plain=100.0, adaptive=adaptive))
    results = Results(machine=machine, rows=measured, settings={"pair": pair})
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


def test_a_drafter_that_learnt_has_bars_of_its_own() -> None:
    """Each pair is judged by its own plain runs, as the machine's speed varies."""
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

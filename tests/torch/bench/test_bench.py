"""The benchmarks of generating, moves and steps, with scripted or tiny workers."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_models import untrained_pair_in
from rich.console import Console
from runs import command

from rlhfspec.bench import trees
from rlhfspec.bench.bars import bars_of_generation as bars, bars_of_rebalance
from rlhfspec.bench.commands import bench
from rlhfspec.bench.draining.batch import DrainingStep, Trace
from rlhfspec.bench.generating.results import ResultRow, Results, published
from rlhfspec.bench.generating.run import BenchSettings, find_vllm_python
from rlhfspec.bench.generating.scenarios import MAX_CONTEXT, PAIRS, SCENARIO_NAMES, scenarios
from rlhfspec.bench.moving.migrating.migrate import MigrateSettings
from rlhfspec.bench.moving.pair import sequences_of
from rlhfspec.bench.moving.rebalancing.rebalance import DifferentTokens, RebalanceBenchmark, RebalanceSettings
from rlhfspec.bench.moving.rebalancing.results import Row, StageResult, StageRun
from rlhfspec.bench.moving.rebalancing.workloads import LEAST_IMBALANCE, stages
from rlhfspec.bench.processor import Processor
from rlhfspec.bench.ratios import against_best, paired
from rlhfspec.bench.rivals.trl_worker import _step
from rlhfspec.bench.stepping import step as bench_step
from rlhfspec.bench.stepping.report import render
from rlhfspec.bench.stepping.results import Step, UnequalWork
from rlhfspec.bench.stepping.step import Measure, StepBenchmark, StepSettings
from rlhfspec.bench.worker import WorkerFailed
from rlhfspec.errors import InvalidRequest
from rlhfspec.job import RLHFJob
from rlhfspec.tiny import models as tiny
from rlhfspec.tiny.tokenizer import hugging_face_tokenizer

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


def rows(scenario: str, **speeds: float) -> list[ResultRow]:
    found = []
    for name, speed in speeds.items():
        mode = name.replace("_", "-").replace("static-", "static:")
        ran: Any = {"scenario": scenario, "mode": mode, "num_threads": 2, "accepted_per_verification": 1.0}
        selector = {"share_of_step": 0.009} if mode == "adaptive" else {}
        found.append(ResultRow(tokens_per_second=speed, repeats=(speed,), selector=selector, **ran))
    return found


@pytest.mark.parametrize(
    ("scenario", "machine", "pair", "adaptive", "holds"),
    [("batch-1", FAST, "english", 330.0, True), ("batch-1", FAST, "english", 329.0, False),
     ("batch-1", SLOW, "english", 250.0, True), ("batch-8", SLOW, "english", 99.0, False),
     ("batch-64", FAST, "english", 104.0, False), ("batch-64", SLOW, "english", 100.0, True),
     ("long-tail", FAST, "english", 144.0, False), ("long-tail", SLOW, "english", 130.0, True),
     ("batch-1", FAST, "library", 101.0, True)],  # on real text it only has to beat plain
)  # fmt: skip
def test_the_bar_against_plain_depends_on_scenario_and_machine(
    scenario: str, machine: Processor, pair: str, adaptive: float, holds: bool
) -> None:
    measured = tuple(rows(scenario, plain=100.0, adaptive=adaptive))
    results = Results(machine=machine, rows=measured, settings={"pair": pair})
    [bar] = [bar for bar in bars(results) if bar.name == "adaptive / plain"]
    assert bar.holds is holds


def test_bars_compare_with_the_best_static_strategy_and_with_vllm() -> None:
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
    [english], [library] = (scenarios(["batch-4"], num_tokens=8, pair=pair) for pair in PAIRS[:2])
    assert set(english.prompts).isdisjoint(library.prompts)
    assert all(len(prompt) < 128 for prompt in scenarios(["batch-64"], num_tokens=8, pair="library")[0].prompts)


def test_bands_of_activity_halve_down_to_one() -> None:
    seen = [(i, n, "a" if n > 4 else "b") for i, n in enumerate([8, 8, 7, 5, 4, 3, 1, 1])]
    steps = [DrainingStep(seconds=i, num_active=n, num_tokens=n, num_verified_nodes=0, strategy=s) for i, n, s in seen]
    assert Trace(mode="adaptive", steps=steps).strategies_by_activity() == [(8, 5, "a"), (4, 3, "b"), (1, 1, "b")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyModels:
    return untrained_pair_in(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("generate --draft x", "goes with"),
        ("generate --model x", "config.json"),
        ("generate --model . --draft . --modes fast", "modes"),
        ("generate --threads abc", "--threads"),
        ("migrate --tokens abc", "--tokens"),
        ("rebalance --model nowhere --draft nowhere", "--model"),
        ("step --model nowhere --draft nowhere", "--model"),
    ],
)
def test_bench_names_wrong_options(words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text("{}")
    assert said in command(["bench", *words.split()], 2).output


def bench_output(models: tiny.TinyModels, *words: str) -> str:
    pair = ["--model", str(models.wide), "--draft", str(models.draft)]
    return command(["bench", *words, *pair, "--batch", "4", "--tokens", "16"], 0).output


def test_explain_shows_predicted_and_real(models: tiny.TinyModels) -> None:
    output, first = bench_output(models, "explain", "--threads", "1", "--decisions", "3"), "decisions: predicted → real"
    for part in (first, "the plans as they looked last", "expected calibration error", "selector's share"):
        assert part in output


def test_trees_compares_with_chains(models: tiny.TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "NODES", (4,))
    assert "-n4" in bench_output(models, "trees")
    gain = trees.TreeGain(num_nodes=32, chain_tokens=10.0, tree_tokens=10.9, tree="x")
    assert (gain.holds, replace(gain, tree_tokens=11.0).holds, replace(gain, num_nodes=8).holds) == (False, True, True)


def test_bench_drain_draws_a_picture(models: tiny.TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "ensure", lambda *_, **__: models)
    picture = tmp_path / "pictures" / "demo.png"
    arguments = ["bench", "drain", "--output", str(picture), "--tokens", "8", "--threads", "1", "--dtype", "float32"]
    outcome = command(arguments, 0)
    assert "64 of 64 sequences" in outcome.output
    assert "the strategy as the batch drained" in outcome.output
    assert picture.exists()


def test_an_arm_with_other_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RebalanceSettings(model="m", draft="m", workloads=("skew",), decoding=("plain",), arms=("dealt", "ours"))
    benchmark = RebalanceBenchmark(settings, lambda _: None)
    run = StageRun(arm="", seconds=1.0, ends=(1.0, 1.0))
    once = lambda pair, stage, decoding, arm, best: (run, f"tokens of {arm}")  # noqa: E731
    monkeypatch.setattr(benchmark, "_once", once)
    monkeypatch.setattr("rlhfspec.bench.moving.rebalancing.rebalance.clairvoyant", lambda stage, curve: ())
    with pytest.raises(DifferentTokens, match="skew, seed 1: ours gave other tokens"):
        benchmark._stage(None, stages("skew", 1)[0], "plain", None)  # type: ignore[arg-type]


def of_stage(workload: str, decoding: str, **seconds: float) -> StageResult:
    runs = {arm: (StageRun(arm=arm, seconds=each, ends=(each, each)),) * 2 for arm, each in seconds.items()}
    return StageResult(workload=workload, decoding=decoding, seed=1, num_tokens=1, imbalance=2.0, predicted={},
                       runs=runs, digest="")  # fmt: skip


def test_bars_ask_for_a_gain_where_there_is_one_and_for_no_harm_elsewhere() -> None:
    seconds = {"dealt": 5.0, "pulled": 4.0, "ours": 4.1, "clairvoyant": 3.0}
    gains = bars_of_rebalance([Row.of([of_stage("groups", "adaptive", **seconds)])])
    assert [(bar.found, bar.holds) for bar in gains] == [("1.22 (1.22-1.22)", False), ("0.45 (0.45-0.45)", False)]
    for workload, decoding in (("independent", "adaptive"), ("groups", "plain")):
        [harm] = bars_of_rebalance([Row.of([of_stage(workload, decoding, **seconds)])])
        assert (harm.found, harm.holds) == ("1.02 (1.02-1.02)", True), "1.025x the better of both, which is pulled"
        [harm] = bars_of_rebalance([Row.of([of_stage(workload, decoding, **seconds | {"ours": 4.2})])])
        assert not harm.holds


def test_groups_are_those_whose_halves_differ() -> None:
    assert all(stage.imbalance >= LEAST_IMBALANCE for stage in stages("groups", 5))
    assert any(stage.imbalance < LEAST_IMBALANCE for stage in stages("independent", 5))


def test_an_engine_does_not_know_how_long_a_response_will_be() -> None:
    [told] = sequences_of(["a/0"], [(1, 2)], [7], [0], [0], max_tokens=960)
    assert (told["length"], told["max_tokens"]) == (7, 960)


def test_no_path_of_the_machine_is_published() -> None:
    assert published(MigrateSettings(model="a/m", draft="d"), "model", "draft", "large_kv")["model"] == "m"


SETTINGS = StepSettings(model="m/target-1", draft="m/draft-1", steps=2, repeats=3, num_tokens=8)


def scripted(seconds: float, *, num_tokens: int = 128) -> Measure:
    warm_up = Step(seconds=50.0, by_stage={"generation": 50.0}, num_tokens=num_tokens)
    by_stage = {"generation": seconds / 2, "training": seconds / 2}
    step = Step(seconds=seconds, by_stage=by_stage, num_tokens=num_tokens, peak_bytes=int(seconds * 1e9))
    return lambda settings: [warm_up] + [step] * settings.steps


def failing(_: StepSettings) -> list[Step]:
    raise WorkerFailed("no TRL here\nand a long story")


def ran(**measures: Measure) -> Any:
    messages: list[str] = []
    results = StepBenchmark(replace(SETTINGS, modes=tuple(measures)), messages.append, measures=measures).run()
    return results, messages


def test_rows_are_medians_without_the_warm_up_and_ratios_are_against_trl(capsys: pytest.CaptureFixture[str]) -> None:
    results, messages = ran(trl=scripted(6.0), plain=scripted(2.0), adaptive=scripted(1.5))
    found = [(row.mode, row.seconds_per_step, len(row.steps)) for row in results.rows]
    assert found == [("trl", 6.0, 6), ("plain", 2.0, 6), ("adaptive", 1.5, 6)]
    assert [row.peak_gigabytes for row in results.rows] == [6.0, 2.0, 1.5]
    assert results.row("plain").by_stage == {"generation": 1.0, "training": 1.0}
    turns = [message.split(": ")[1] for message in messages if "took" not in message]
    assert turns == ["trl", "plain", "adaptive", "plain", "adaptive", "trl", "adaptive", "trl", "plain"]  # interleaved
    written = json.loads(results.to_json())
    assert written["times_as_fast_as_trl"] == {"plain": 3.0, "adaptive": 4.0}
    assert {"mode", "seconds_per_step", "by_stage"} <= written["rows"][0].keys()
    assert written["settings"]["model"] == "target-1"  # no path of the machine
    Console(width=150).print(render(results))
    [line] = [line for line in capsys.readouterr().out.splitlines() if "adaptive / TRL" in line]
    assert line.replace("│", " ").split() == ["✓", "2", "step", "adaptive", "/", "TRL", ">=", "2.00", "4.00"]
    assert [(bar["name"], bar["holds"]) for bar in written["bars"]] == [("plain / TRL", True), ("adaptive / TRL", True)]


def test_a_missing_rival_is_named_once_and_ours_go_on() -> None:
    results, messages = ran(trl=failing, plain=scripted(2.0))
    assert results.skipped == ("trl: no TRL here",)
    assert [row.mode for row in results.rows] == ["plain"]
    assert results.times_as_fast("plain") is None
    assert messages.count("trl is left out: no TRL here") == 1
    with pytest.raises(WorkerFailed):  # ours must work
        ran(plain=failing)


def test_unequal_lengths_are_refused() -> None:
    ran(trl=scripted(6.0, num_tokens=128), plain=scripted(2.0, num_tokens=130))
    with pytest.raises(UnequalWork, match=r"trl 128, plain 132"):
        ran(trl=scripted(6.0, num_tokens=128), plain=scripted(2.0, num_tokens=132))


@pytest.mark.parametrize(
    ("settings", "field", "value", "said"),
    [(BenchSettings, "modes", ("plain", "vlm"), "modes: must be among"),
     (BenchSettings, "modes", ("hf",), "at least one of ours"), (MigrateSettings, "links", ("memory",), "links"),
     (MigrateSettings, "tokens", (10,), "tokens"), (MigrateSettings, "repeats", 0, "repeats"),
     (RebalanceSettings, "workloads", ("none",), "workloads"), (StepSettings, "modes", ("verl",), "modes"),
     (StepSettings, "samples_per_prompt", 1, "samples_per_prompt"), (StepSettings, "steps", 0, "steps"),
     (StepSettings, "num_threads", 0, "num_threads"), (StepSettings, "num_prompt_tokens", 1, "num_prompt_tokens"),
     (StepSettings, "algorithm", "dpo", "algorithm")],
)  # fmt: skip
def test_impossible_settings_are_refused_by_name(settings: Any, field: str, value: Any, said: str) -> None:
    model = "target" if settings is BenchSettings else "model"
    with pytest.raises(InvalidRequest, match=said):
        settings(**{model: "m", "draft": "d", field: value})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_job_is_valid_and_says_what_trl_is_told(dtype: str) -> None:
    settings = replace(SETTINGS, dtype=dtype, kl_coefficient=0.1, learning_rate=2e-6)
    job = RLHFJob.model_validate(bench_step.job_of(settings, "adaptive"))
    told = bench_step._trl_arguments(settings, "folder")
    assert job.spec.generation.ignore_eos
    assert job.spec.algorithm.kl_coefficient == told["beta"]
    assert job.spec.training.optimizer.learning_rate == told["learning_rate"]
    assert job.spec.training.steps == told["steps"] == 3
    assert len(told["prompts"]) == len(set(told["prompts"])) == 3 * settings.prompts_per_step
    assert (job.spec.training.autocast == "bfloat16") == (dtype == "bfloat16")


def test_trl_stages_add_up_to_the_step() -> None:
    calls = {"_generate": 3.0, "_calculate_rewards": 0.5, "_generate_and_score_completions": 5.0}
    step = _step({"seconds": 9.0, "calls": calls, "num_tokens": 16})
    assert step["by_stage"] == {"generation": 3.0, "reward": 0.5, "reference": 1.5, "training": 4.0}


def test_a_python_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench_step.find_trl_python(None) is None
    assert bench_step.find_trl_python(sys.executable) == Path(sys.executable)
    with pytest.raises(InvalidRequest, match="trl_python"):
        bench_step.find_trl_python("/no/such/python")
    with pytest.raises(InvalidRequest, match="vllm_python"):
        find_vllm_python("/nowhere/python")


def test_long_prompts_are_of_one_length_and_all_different(tmp_path: Path) -> None:
    settings = replace(SETTINGS, **bench.LONG_PROMPTS)
    texts, encode = settings.prompts(), hugging_face_tokenizer()
    assert {len(encode(text)["input_ids"]) for text in texts} == {768}
    assert len(set(texts)) == settings.num_steps * settings.prompts_per_step
    job = RLHFJob.model_validate(bench_step.job_of(settings, "off"))
    assert job.spec.dataset.max_prompt_tokens == 768, "none of them is left out"
    assert job.spec.algorithm.samples_per_prompt == 16


def test_ppo_is_ours_alone_and_trains_a_critic(tmp_path: Path) -> None:
    settings = replace(SETTINGS, algorithm="ppo")
    job = RLHFJob.model_validate(bench_step.job_of(settings, "off"))
    assert job.spec.algorithm.name == "ppo"
    assert job.spec.algorithm.kl_coefficient == settings.kl_coefficient
    with pytest.raises(WorkerFailed, match=r"TRL 1\.16 trains no ppo"):
        bench_step.measure_trl(settings)

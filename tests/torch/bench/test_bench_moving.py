"""The benchmarks of moves: small real runs of both, two processes each, and what their figures are made of."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rlhfspec.bench.moving import migrate_plot, migrate_report, rebalance_plot, rebalance_report
from rlhfspec.bench.moving.migrate import MigrateBenchmark, MigrateSettings
from rlhfspec.bench.moving.pair import Pair, sequences_of
from rlhfspec.bench.moving.rebalance import DifferentTokens, RebalanceBenchmark, RebalanceSettings
from rlhfspec.bench.moving.rebalance_results import Row, StageResult, StageRun, bars
from rlhfspec.bench.moving.workloads import LEAST_IMBALANCE, stages
from rlhfspec.bench.worker import WorkerFailed
from rlhfspec.cli import bench
from rlhfspec.cli.moving import generator_command, rebalancer_of_a_run
from rlhfspec.errors import InvalidRequest
from rlhfspec.records import Move
from rlhfspec.tiny import random_model
from rlhfspec.tiny.tokenizer import VOCAB_SIZE, hugging_face_tokenizer


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


# -- rebalance --------------------------------------------------------------------------------------------------------


class Hasty:
    """A run's rebalancer, which moves the longest sequences at the first news besides."""

    def __init__(self, now: float, limit: int, earlier: Sequence[int], longest: Sequence[int]) -> None:
        self._real = rebalancer_of_a_run(now, limit, earlier)
        self._longest, self._has_moved = longest, False
        self.loaded, self.moved = self._real.loaded, self._real.moved
        self._stage = ""

    def finished(self, sample_id: str, prompt: tuple[int, ...], length: int) -> None:
        self._real.finished(sample_id, prompt, length)
        self._stage = sample_id.split("/")[0]

    def moves(self, now: float) -> list[Move]:
        if self._has_moved or not self._stage:
            return list(self._real.moves(now))
        self._has_moved = True
        names = [f"{self._stage}/{number}/{number}" for number in self._longest]
        return [Move(id=f"{name}/hasty", job="bench", sample_id=name, source=0, destination=1, gain_seconds=1.0,
                     reason="hasty") for name in names]  # fmt: skip


def test_rebalance_runs_every_arm_with_the_same_tokens(model: str, tmp_path: Path) -> None:
    settings = RebalanceSettings(
        model=model,
        draft=model,
        workloads=("skew",),
        decoding=("adaptive",),
        sizes=(1, 8),
        seeds=1,
        repeats=1,
        scale=0.3,
    )
    said: list[str] = []
    lengths = stages("skew", 1, 0.3)[0].lengths
    hasty = partial(Hasty, longest=sorted(range(len(lengths)), key=lengths.__getitem__)[-6:])  # some may end meanwhile
    results = RebalanceBenchmark(settings, generator_command, hasty, said.append).run()
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
    written = json.loads(results.to_json())
    assert written["rows"][0]["seconds"].keys() >= {"dealt", "ours", "ideal"}
    assert str(tmp_path) not in results.to_json()
    rebalance_plot.plot(results, tmp_path / "rebalance.png")
    assert (tmp_path / "rebalance.png").stat().st_size > 10_000


def test_an_arm_with_other_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RebalanceSettings(model="m", draft="m", workloads=("skew",), decoding=("plain",), arms=("dealt", "ours"))
    benchmark = RebalanceBenchmark(settings, generator_command, rebalancer_of_a_run, lambda _: None)
    run = StageRun(arm="", seconds=1.0, ends=(1.0, 1.0))
    once = lambda pair, stage, decoding, arm, best: (run, f"tokens of {arm}")  # noqa: E731
    monkeypatch.setattr(benchmark, "_once", once)
    monkeypatch.setattr("rlhfspec.bench.moving.rebalance.clairvoyant", lambda stage, curve: ())
    with pytest.raises(DifferentTokens, match="skew, seed 1: ours gave other tokens"):
        benchmark._stage(None, stages("skew", 1)[0], "plain", None)  # type: ignore[arg-type]


def of_stage(workload: str, decoding: str, **seconds: float) -> StageResult:
    runs = {arm: (StageRun(arm=arm, seconds=each, ends=(each, each)),) * 2 for arm, each in seconds.items()}
    return StageResult(workload=workload, decoding=decoding, seed=1, num_tokens=1, imbalance=2.0, predicted={},
                       runs=runs, digest="")  # fmt: skip


def test_bars_ask_for_a_gain_where_there_is_one_and_for_no_harm_elsewhere() -> None:
    seconds = {"dealt": 5.0, "pulled": 4.0, "ours": 4.1, "clairvoyant": 3.0}
    gains = bars([Row.of([of_stage("groups", "adaptive", **seconds)])])
    assert [(bar.found, bar.holds) for bar in gains] == [("1.22 (1.22-1.22)", False), ("0.45 (0.45-0.45)", False)]
    for workload, decoding in (("independent", "adaptive"), ("groups", "plain")):
        [harm] = bars([Row.of([of_stage(workload, decoding, **seconds)])])
        assert (harm.found, harm.holds) == ("1.02 (1.02-1.02)", True), "1.025x the better of both, which is pulled"
        [harm] = bars([Row.of([of_stage(workload, decoding, **seconds | {"ours": 4.2})])])
        assert not harm.holds


def test_groups_are_those_whose_halves_differ() -> None:
    assert all(stage.imbalance >= LEAST_IMBALANCE for stage in stages("groups", 5))
    assert any(stage.imbalance < LEAST_IMBALANCE for stage in stages("independent", 5))


def test_an_engine_does_not_know_how_long_a_response_will_be() -> None:
    [told] = sequences_of(["a/0"], [(1, 2)], [7], [0], [0], max_tokens=960)
    assert (told["length"], told["max_tokens"]) == (7, 960)


# -- migrate ----------------------------------------------------------------------------------------------------------


def test_migrate_measures_moves_there_and_back(model: str, tmp_path: Path) -> None:
    settings = MigrateSettings(model=model, draft=model, links=("tcp",), tokens=(128,), decoding=("plain",),
                               repeats=2, moves_per_stage=2, link_rounds=0)  # fmt: skip
    results = MigrateBenchmark(settings, generator_command, lambda _: None).run()
    assert [(cell.link, len(cell.moves)) for cell in results.cells] == [("tcp", 2)]
    for cell in results.cells:
        assert cell.prefill_gap > 0
        for move in cell.moves:
            assert move.num_bytes > 0
            assert min(move.pause, move.gap, move.seconds, move.step) > 0
    text = shown(migrate_report.render(results))
    assert "an engine held" in text
    written = json.loads(results.to_json())
    assert {"pause", "gap", "cpu_per_mb", "break_even_tokens"} <= written["cells"][0]["medians"].keys()
    migrate_plot.plot(results, tmp_path / "migrate.png")
    assert (tmp_path / "migrate.png").stat().st_size > 10_000


def test_a_generator_that_dies_ends_the_benchmark_with_its_reason() -> None:
    dying = [sys.executable, "-c", "raise SystemExit('no model is nowhere')"]
    with Pair.start(lambda number, core: dying) as pair, pytest.raises(WorkerFailed, match="no model is nowhere"):
        pair.load(target="nowhere", draft=None, link="shm")


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"links": ("memory",)}, "links"), ({"tokens": (10,)}, "tokens"), ({"repeats": 0}, "repeats")],
)
def test_settings_name_the_field_to_fix(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        MigrateSettings(model="m", draft="d", **settings)
    with pytest.raises(InvalidRequest, match="workloads"):
        RebalanceSettings(model="m", draft="d", workloads=("none",))
    assert dataclasses.replace(MigrateSettings(model="a/m", draft="d")).published()["model"] == "m"


def test_the_command_line_tells_of_a_wrong_word() -> None:
    answer = CliRunner().invoke(bench.app, ["rebalance", "--model", "nowhere", "--draft", "nowhere"])
    assert answer.exit_code == 2
    assert "--model" in answer.output


@pytest.mark.parametrize("option", ["--tokens", "--threads"])
def test_numbers_that_are_none_are_one_line(option: str) -> None:
    command = "migrate" if option == "--tokens" else "generate"
    answer = CliRunner().invoke(bench.app, [command, option, "abc"])
    assert answer.exit_code == 2
    assert option in answer.output
    assert not answer.exception or isinstance(answer.exception, SystemExit)

"""Benchmarks of moves between generators in separate processes."""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlhfspec.bench.moving.migrating import plot as migrate_plot
from rlhfspec.bench.moving.migrating import report as migrate_report
from rlhfspec.bench.moving.migrating.migrate import MigrateBenchmark, MigrateSettings
from rlhfspec.bench.moving.pair import Pair
from rlhfspec.bench.moving.rebalancing import plot as rebalance_plot
from rlhfspec.bench.moving.rebalancing import report as rebalance_report
from rlhfspec.bench.moving.rebalancing.rebalance import RebalanceBenchmark, RebalanceSettings
from rlhfspec.bench.moving.rebalancing.rebalancer import RunsRebalancer
from rlhfspec.bench.moving.rebalancing.workloads import stages
from rlhfspec.bench.worker import WorkerFailed
from rlhfspec.messages.records import Move
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


class Hasty:
    def __init__(self, now: float, limit: int, earlier: Sequence[int], longest: Sequence[int]) -> None:
        self._real = RunsRebalancer(now, limit, earlier)
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


@pytest.mark.whole("a benchmark of generators that are processes")
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
    written = json.loads(results.to_json())
    assert written["rows"][0]["seconds"].keys() >= {"dealt", "ours", "ideal"}
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

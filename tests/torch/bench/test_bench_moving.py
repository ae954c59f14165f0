"""Benchmarks of moves: small real runs of two processes, and their figures."""

from typing import Any

import pytest
from typer.testing import CliRunner

from rlhfspec.bench.bars import bars_of_rebalance
from rlhfspec.bench.commands import bench
from rlhfspec.bench.generating.results import published
from rlhfspec.bench.moving.migrating.migrate import MigrateSettings
from rlhfspec.bench.moving.pair import sequences_of
from rlhfspec.bench.moving.rebalancing.rebalance import DifferentTokens, RebalanceBenchmark, RebalanceSettings
from rlhfspec.bench.moving.rebalancing.results import Row, StageResult, StageRun
from rlhfspec.bench.moving.rebalancing.workloads import LEAST_IMBALANCE, stages
from rlhfspec.errors import InvalidRequest


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


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"links": ("memory",)}, "links"), ({"tokens": (10,)}, "tokens"), ({"repeats": 0}, "repeats")],
)
def test_settings_name_the_field_to_fix(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        MigrateSettings(model="m", draft="d", **settings)
    with pytest.raises(InvalidRequest, match="workloads"):
        RebalanceSettings(model="m", draft="d", workloads=("none",))
    assert published(MigrateSettings(model="a/m", draft="d"), "model", "draft", "large_kv")["model"] == "m"


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

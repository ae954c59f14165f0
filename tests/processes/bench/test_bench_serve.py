"""The benchmark of chats: arrivals, a whole run with a tiny model, its bars, and answers that differ."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from bench_models import untrained_pair_in
from chats import chat_engine
from runs import command

from rlhfspec.bench.serving.load import chats, rollouts
from rlhfspec.bench.serving.ours import SharedEngine
from rlhfspec.bench.serving.results import ServeResults, ServeRow, ServeTurn, TimedAnswer, bars_of_serve
from rlhfspec.bench.serving.run import DifferentAnswers, ServeBenchmark, ServeSettings
from rlhfspec.engine import Request, SamplingParams

SETTINGS = ServeSettings(model="m", draft=None)


def test_the_engine_holds_the_target_of_the_bars() -> None:
    assert replace(SETTINGS, tpot=0.2).engine_options()["target_tpot"] == 0.2


def test_chats_arrive_at_random_at_the_rate_asked_for() -> None:
    arrivals = [chat.at for chat in chats(["a", "b"], 2000, rate=4.0, num_tokens=8, repetition=0)]
    waits = [later - before for before, later in pairwise([0.0, *arrivals])]
    assert statistics.fmean(waits) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(waits) == pytest.approx(0.25, rel=0.1), "as many as the mean: a Poisson process"


def test_a_run_measures_every_mode_and_finds_the_same_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where there is no .venv-vllm
    monkeypatch.delenv("RLHFSPEC_VLLM_PYTHON", raising=False)
    models = untrained_pair_in(tmp_path / "models")
    command(
        ["bench", "serve", "--model", str(models.target), "--draft", str(models.draft), "--rate", "20", "--chats", "8",
         "--tokens", "8", "--repeats", "1", "--modes", "alone,rollouts,priority,equal,vllm-alone",
         "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")],
        0,
    )  # fmt: skip
    results = json.loads((tmp_path / "out.json").read_text())
    rows = {row["mode"]: row for row in results["rows"]}
    assert list(rows) == ["alone", "rollouts", "priority", "equal"]
    assert "make setup-vllm" in results["skipped"][0]
    told = {mode: [answer["digest"] for answer in row["turns"][0]["answers"]] for mode, row in rows.items()}
    assert told["rollouts"] == []
    assert len(set(told["alone"])) == 8
    assert told["alone"] == told["priority"] == told["equal"]
    for mode, row in rows.items():
        assert (row["rollout_speed"] > 0) is (mode != "alone")
        assert (row["kept"] is not None) is (mode in ("priority", "equal"))
        assert all(answer["ttft"] > 0 and answer["num_tokens"] >= 4 for answer in row["turns"][0]["answers"])
    assert {bar["name"] for bar in results["bars"]} == {"median TTFT", "p95 TPOT", "rollouts / rollouts alone"}
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_an_answer_that_differs_between_two_modes_fails() -> None:
    benchmark = ServeBenchmark(SETTINGS, lambda _: None)
    benchmark.compare("alone", 0, {"chat 0": "a", "chat 1": "b"})
    benchmark.compare("priority", 0, {"chat 0": "a", "rollout /3": "c"})
    benchmark.compare("priority", 1, {"chat 0": "other seed"})
    with pytest.raises(DifferentAnswers, match="rollout /3, repetition 1: equal gave other tokens than priority"):
        benchmark.compare("equal", 0, {"chat 0": "a", "rollout /3": "d"})


def turns_of(ttft: float, tpots: Sequence[float], num_rollout_tokens: int) -> list[ServeTurn]:
    answers = [TimedAnswer(ttft=ttft, tpot=tpot, gap=tpot, num_tokens=9, digest="") for tpot in tpots]
    turn = ServeTurn(seconds=10.0, answers=tuple(answers), num_rollout_tokens=num_rollout_tokens, step_seconds=0.05)
    return [turn, turn]


def bars(ttft: float, tpot: float, num_rollout_tokens: int) -> dict[str, bool]:
    turns = {"rollouts": turns_of(0.0, [], 1000), "priority": turns_of(ttft, [tpot] * 5, num_rollout_tokens)}
    rows = tuple(ServeRow.of(mode, turns, ttft=1.0, tpot=0.1) for mode in turns)
    settings: dict[str, Any] = {"num_threads": 1, "tpot": 0.1}
    found = bars_of_serve(ServeResults(machine=None, rows=rows, idle_ttft={"ours": 0.2}, settings=settings))
    return {bar.name: bar.holds for bar in found}


def test_bars_ask_for_a_prompt_start_steady_tokens_and_most_of_the_rollouts() -> None:
    names = ("median TTFT", "p95 TPOT", "rollouts / rollouts alone")
    assert bars(0.24, 0.129, 610) == dict.fromkeys(names, True)
    assert bars(0.26, 0.131, 590) == dict.fromkeys(names, False), "a step of 50 ms and an idle server's 200 ms"


def test_goodput_counts_the_chats_that_met_both_targets() -> None:
    [turn, _] = turns_of(0.5, [0.05, 0.09, 0.11], 0)
    late = replace(turn, answers=tuple(replace(answer, ttft=1.1) for answer in turn.answers))
    assert ServeRow.of("alone", {"alone": [turn, late]}, ttft=1.0, tpot=0.1).goodput == 2 / 20.0


@pytest.mark.parametrize("equal", [False, True])
def test_the_next_rollout_begins_when_one_ends_and_a_chat_has_priority_unless_all_are_equal(equal: bool) -> None:
    engine = chat_engine()
    planned = rollouts([(3, 5, 7)], num_tokens=6, repetition=0)
    shared: Any = SharedEngine(engine, planned, 2, name="turn", equal=equal)
    params = SamplingParams(max_tokens=99, ignore_eos=True)
    shared.submit(Request(id="chat", prompt_token_ids=(9, 8), params=params, seed=1, priority=2))
    assert engine.state.sequences["chat"].request.priority == (0 if equal else 2)
    while len(shared.digests) < 5:
        shared.step()
        assert len(engine.state.sequences) == 3
    assert set(shared.digests) >= {"/0", "/1", "/2"}
    assert shared.num_tokens == engine.stats().num_generated_tokens
    shared.leave()
    assert list(engine.state.sequences) == ["chat"]

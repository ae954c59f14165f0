import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loads import knowing, moved, skewed
from places import ROOT
from runs import command, rlhfspec, write_data, write_models
from typer.testing import Result
from views import a_full_view, picture, terminal

from rlhfspec.engine import Engine, SamplingParams
from rlhfspec.engine.distilling import learning as distilling
from rlhfspec.engine.distilling.eagle_student import EagleStudent
from rlhfspec.huggingface.heads.eagle import load_head, new_head, save_head
from rlhfspec.rebalancer.knowledge import Advice
from rlhfspec.rebalancer.service import plan_of
from rlhfspec.runs.folder.moves import MovesFile
from rlhfspec.telemetry.base import WorkerPlace
from rlhfspec.telemetry.meters import Meters
from rlhfspec.telemetry.prometheus import text_of
from rlhfspec.tiny import random_model
from rlhfspec.tiny.tokenizer import VOCAB_SIZE

PROMPTS = [[65, 66, 67], [70, 71]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(distilling, "LESSON_TOKENS", 64)
    write_models(tmp_path, policy := random_model("llama", seed=3, vocab_size=VOCAB_SIZE, num_layers=8))
    save_head(new_head(policy, 100), tmp_path / "head")
    write_data(tmp_path)
    return tmp_path


def train(
    place: Path, *given: str, model: str = "policy", data: str = "data.jsonl", out: str = "made", drafter: str = "head",
    code: int | None = 0,
) -> Result:  # fmt: skip
    files = ["--data", str(place / data), "--out", str(place / out), "--drafter", str(place / drafter)]
    small = ["--max-tokens", "24", "--tokens", "300"]
    return command(["drafter", "train", str(place / model), *files, *small, *given], code)


def generated(place: Path, drafter: Path | str | None) -> list[Any]:
    engine = Engine.from_pretrained(
        place / "policy", drafter=drafter, speculation="off" if drafter is None else "model", profile=False,
        max_sequences=4, max_context=64, num_threads=1,
    )  # fmt: skip
    done = engine.generate(PROMPTS * 4, SamplingParams(max_tokens=40, ignore_eos=True))
    return [(each.token_ids, each.log_probs) for each in done]


def test_a_drafter_is_made_and_changes_no_token(place: Path) -> None:
    result = train(place, "--tokens", "3000")
    last = result.stdout.splitlines()[-1]
    assert "made: learnt from 3," in last
    assert last.endswith(" by depth, on unseen answers")
    assert load_head(place / "made").config.vocab_size == VOCAB_SIZE
    assert generated(place, None) == generated(place, place / "head") == generated(place, place / "made")


@pytest.mark.parametrize("given", [[], ["--shape", "eagle3"]])
def test_a_drafter_is_made_from_nothing(place: Path, given: list[str]) -> None:
    files = ["--data", str(place / "data.jsonl"), "--out", str(place / "made"), "--max-tokens", "24"]
    command(["drafter", "train", str(place / "policy"), *files, "--tokens", "300", *given], 0)
    assert load_head(place / "made").num_draft_tokens == VOCAB_SIZE // 6
    assert "eagle3" in command(["drafter", "train", str(place / "policy"), *files, "--shape", "medusa"], 2).output


def before_each_lesson(monkeypatch: pytest.MonkeyPatch, act: Callable[[EagleStudent], object]) -> None:
    genuine = EagleStudent.learn
    monkeypatch.setattr(EagleStudent, "learn", lambda self, lessons: (act(self), genuine(self, lessons))[1])


def test_the_saved_drafter_holds_what_was_learnt(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learnt: list[EagleStudent] = []
    before_each_lesson(monkeypatch, learnt.append)
    train(place)
    found, first = load_head(place / "made").state_dict(), load_head(place / "head").state_dict()
    trained = learnt[-1].model.state_dict()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in found.items())
    assert not torch.equal(found["fc.weight"], first["fc.weight"])


def test_ctrl_c_leaves_a_whole_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before_each_lesson(monkeypatch, lambda _: os.kill(os.getpid(), signal.SIGINT))
    result = train(place, "--tokens", "1000000000", "--seconds", "1000000")
    assert "made: learnt from" in result.stdout
    load_head(place / "made")


def test_training_a_drafter_stops_at_the_time_limit(place: Path) -> None:
    assert "learnt from 0 tokens" in train(place, "--seconds", "0").stdout


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"out": "policy"}, "--out: already exists"),
        ({"out": "data.jsonl"}, "--out: already exists"),
        ({"data": "none.jsonl"}, "none.jsonl"),
        ({"data": "rewards.py"}, "rewards.py"),
        ({"model": "none"}, "none"),
        ({"column": "text"}, "--column: "),
        *(
            ({"drafter": name}, "--drafter: is no EAGLE-3 drafter, and no other learns")
            for name in ("none", "self", "auto", "drafter")
        ),
    ],
)
def test_wrong_options_of_drafter_train_are_refused_in_one_line(place: Path, given: dict[str, str], said: str) -> None:
    options = ["--column", given["column"]] if "column" in given else []
    named = {name: value for name, value in given.items() if name != "column"}
    before = sorted(place.iterdir())
    result = train(place, *options, **named, code=None)
    assert result.exit_code in (1, 2)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    problem = [line for line in result.stderr.splitlines() if not line.startswith(("reading", "loading"))]
    assert len(problem) <= 2, problem
    assert said in problem[-1]
    assert sorted(place.iterdir()) == before


def an_advice(**changed: Any) -> Advice:
    knowledge = knowing()
    skewed(knowledge, 5.0, **changed)
    return knowledge.advise(5.0)


def a_run(folder: Path) -> None:
    file = MovesFile(folder, now=lambda: 0.0)
    advice = an_advice()
    file.plan(plan_of(advice, None, id="sums/plan/a/1", job="sums"))
    file.moved([moved(advice.moves[0], num_bytes=4_700_000, num_rounds=2, pause_seconds=0.0123)])
    file.moved([moved(advice.moves[1], "kept", reason="no free row")])
    plan = plan_of(an_advice(num_free_rows=0), None, id="sums/plan/a/2", job="sums")
    file.plan(replace(plan, dry=dict(enumerate(("consolidate", "learn", "score", "wait")))))


def test_explain_moves_shows_each_move_with_reason_and_outcome(tmp_path: Path) -> None:
    a_run(tmp_path)
    told = command(["explain-moves", str(tmp_path)], 0)
    lines = [line.partition("  ")[2] for line in told.output.splitlines()]
    assert lines[0].startswith("8 samples on 2 generators: the last ends in 2.")
    assert "generator 0 -> 1: generator 0 ends in 2." in lines[1]
    assert "moved with its KV cache, 4.7 MB in 2 rounds, a pause of 12.3 ms" in told.output
    assert "generator 0 -> 1: stayed: no free row" in told.output
    assert "; no moves" in told.output
    assert "generator 1 has nothing to do: its drafter learns" in told.output
    assert told.output.splitlines()[-1] == "4 moves were advised"


def test_explain_moves_json_prints_the_lines_of_the_file(tmp_path: Path) -> None:
    a_run(tmp_path)
    told = command(["explain-moves", str(tmp_path), "--json"]).output.splitlines()
    assert [json.loads(x) for x in told] == [json.loads(x) for x in (tmp_path / "moves.jsonl").read_text().splitlines()]


def test_a_folder_without_moves_is_one_line(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        refused = command(["explain-moves", str(folder)], 2)
        assert refused.output.startswith("RUN: ")
        assert len(refused.output.splitlines()) == 1


def test_the_view_has_a_row_of_moves() -> None:
    view = a_full_view(console := terminal())
    advice = an_advice()
    view.progress.plan(plan_of(advice, None, id="plan", job="sums"))
    view.progress.moved(moved(advice.moves[0]))
    view.progress.moved(moved(advice.moves[1], "kept"))
    [row] = [line for line in picture(view, console) if "moves " in line]
    assert "1 not" in row
    assert "generator 0 ends in" in row


def test_moves_are_counted() -> None:
    meters = Meters()
    advice = an_advice()
    place = WorkerPlace("generator", 0)
    ended = [
        moved(advice.moves[0], num_bytes=1000, pause_seconds=0.004),
        moved(advice.moves[1], "tokens", num_recomputed=70, pause_seconds=0.2),
        moved(advice.moves[2], "kept", reason="no room", num_bytes=9, pause_seconds=9.0),
    ]
    for record in ended:
        meters.published(place, record, 0.0, True)
    text = text_of(meters.metrics())
    for how in ("kv", "tokens", "kept"):
        assert f'rlhfspec_moves_total{{how="{how}",stage="generator",worker="0"}} 1.0' in text
    assert 'rlhfspec_move_bytes_total{stage="generator",worker="0"} 1000.0' in text
    assert 'rlhfspec_move_recomputed_tokens_total{stage="generator",worker="0"} 70.0' in text
    assert 'rlhfspec_move_pause_seconds_bucket{how="kv",le="0.005",stage="generator",worker="0"} 1.0' in text
    assert 'how="kept",le' not in text


JOBS = ROOT / "examples" / "cluster"
FITS = {"8b-8xh100": "h100", "70b-4x8xb200": "b200"}


def test_every_example_for_a_cluster_is_here() -> None:
    assert {path.stem for path in JOBS.glob("*.yaml")} == set(FITS)


@pytest.mark.parametrize(("name", "gpu"), FITS.items())
def test_an_example_for_a_cluster_is_valid_and_fits(name: str, gpu: str) -> None:
    job = JOBS / f"{name}.yaml"
    output = rlhfspec("validate", job, "--set", "roles.generator.workers=1")  # memory is not that of this machine
    assert output.splitlines()[0] == f"{job}: valid"
    output = rlhfspec("plan", job, "--gpu-memory", gpu)
    assert [line.split()[0] for line in output.splitlines()[1:]] == ["model", "trainer", "generator", "weights"]


def test_what_cannot_fit_is_refused_with_the_sum() -> None:
    output = rlhfspec("plan", JOBS / "70b-4x8xb200.yaml", "--gpu-memory", "80", code=2)
    assert "does not fit\n  trainer: weights 17.6 + gradients 17.6 + optimizer 35.3" in output
    assert "  generator: weights 141.1 + KV 1.4 + forwards 1.8 = 144.3 GB, but may use only 68 GB" in output


def test_roles_that_share_a_gpu_add_up() -> None:
    job = JOBS / "8b-8xh100.yaml"
    output = rlhfspec("plan", job, "--gpus", "4", code=2)
    assert "8 processes need a GPU each (trainer 4, generator 4), but there are 4" in output
    shared = ("--gpus", "4", "--set", "shareGpus=true", "--set", "generation.gpuMemoryFraction=0.5")
    output = rlhfspec("plan", job, *shared, code=2)
    assert "GPU 3: 1 x trainer 43.9 + 1 x generator 40.0 = 83.9 GB" in output
    rlhfspec("plan", job, *shared, "--gpu-memory", "141")


def test_an_unknown_gpu_and_a_model_whose_configuration_is_not_here_are_named(tmp_path: Path) -> None:
    for option, value, said in (
        ("--set", f"model.path={tmp_path}", "spec.model.path"),
        ("--gpu-memory", "h10", "--gpu-memory: must be a number of GB or one of a10g"),
    ):
        assert said in rlhfspec("plan", JOBS / "8b-8xh100.yaml", option, value, code=2)

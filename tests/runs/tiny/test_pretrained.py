"""What the toys show of the law, moves and runs, on a real pretrained model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moving import Bits, at_once, bits, drain, in_rounds, reserved
from places import ROOT
from runs import curve_of, with_spec, write_data, write_job
from started import OFF, TWO, Started

from rlhfspec.engine import Engine, Request, SamplingParams
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.errors import StorageError
from rlhfspec.tiny import smollm2

PRETRAINED = "a pretrained model of 135M parameters"
pytestmark = [pytest.mark.whole(PRETRAINED), pytest.mark.timeout(3000)]
SUMS = [f"What is {first} + {second}?" for first, second in ((3, 4), (12, 9), (40, 2), (7, 7))]
SUFFIX = DraftPlan(drafter="suffix", depth=4, width=2, branch=2)
Move = Callable[[Engine, Engine, str, np.random.Generator], Any]


@pytest.fixture(scope="module")
def model() -> Path:
    pytest.importorskip("gguf")
    try:
        return smollm2.ensure()
    except StorageError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def requests(model: Path) -> list[Request]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": question}] for question in SUMS]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    return [
        Request(id=f"{index}/{sample}", prompt_token_ids=tuple(prompt), params=params, seed=10 * index + sample)
        for index, prompt in enumerate(prompts)
        for sample in range(2)
    ]


def engine(model: Path, **options: Any) -> Engine:
    chosen = {"max_sequences": 8, "max_context": 256, "profile": False, "num_threads": 1, "speculation": "off"}
    return Engine.from_pretrained(model, **(chosen | options))


def generated(engine: Engine, requests: list[Request]) -> dict[str, Bits]:
    for request in requests:
        engine.submit(request)
    return {name: bits(done) for name, done in drain(engine).items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_depend_on_neither_neighbours_nor_drafts(model: Path, requests: list[Request], dtype: str) -> None:
    plain = engine(model, dtype=dtype)
    alone = {request.id: generated(plain, [request])[request.id] for request in requests}
    assert len({found[0] for found in alone.values()}) == len(requests), "they are different samples"
    assert generated(plain, requests) == alone
    for speculation in ("adaptive", SUFFIX):
        plain.set_speculation(speculation)
        assert generated(plain, requests) == alone, speculation


def test_it_is_right_at_all_its_positions(model: Path) -> None:
    assert engine(model, max_context=8192, max_sequences=1, kv_cache_tokens=8192).reports["model"].path == "native"


@pytest.mark.parametrize("move", [at_once, reserved, in_rounds])
def test_a_moved_sequence_has_the_bits_of_an_unmoved_one(model: Path, requests: list[Request], move: Move) -> None:
    here, there = engine(model), engine(model)
    wanted = generated(here, requests)
    for request in requests:
        here.submit(request)
    rng, done = np.random.default_rng(0), {}
    for request in requests[::2]:
        for _ in range(3):
            done |= {each.id: bits(each) for each in here.step().finished}
        done |= {each.id: bits(each) for each in move(here, there, request.id, rng) or ()}
    for each in (here, there):
        done |= {name: bits(found) for name, found in drain(each).items()}
    assert done == wanted


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    write_data(tmp_path)
    rows = [{"messages": [{"role": "user", "content": question}]} for question in SUMS]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return with_spec(
        write_job(tmp_path, tmp_path, samplesPerPrompt=2), model={"path": "smollm2", "drafter": None},
        dataset={"messagesColumn": "messages"}, generation={"maxTokens": 8},
        training={"steps": 2, "promptsPerStep": 2, "optimizer": {"learningRate": 1e-5}},
    )  # fmt: skip


def test_processes_and_killed_runs_keep_the_curve(model: Path, job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("started.PATIENCE_SECONDS", 800.0)
    run = Started(job_file, "whole", OFF, processes=False)
    run.ends()
    Started(job_file, "drafting", "generation.speculation.mode=adaptive", *TWO).ends()
    killed = Started(job_file, "killed", OFF, processes=False)
    killed.until_step(1)
    killed.process.kill()
    killed.process.communicate()
    Started(job_file, "killed", OFF, processes=False, resume=True).ends()
    assert len(run.curve()) == 2
    assert curve_of(job_file, "drafting") == curve_of(job_file, "killed") == run.curve()


def test_smollm2_reward_rises_without_collapse(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out questions are all different, so that few different answers would be a collapse."""
    monkeypatch.setattr("started.PATIENCE_SECONDS", 2000.0)
    out = str(tmp_path / "out")
    half = ("training.steps=10", "checkpoint.export=false")
    run = Started(ROOT / "examples" / "smollm2.yaml", out, *half, processes=False)
    code, output = run.ended()
    assert code == 0, output
    first, *_, last = (
        json.loads(line)["reward"]["mean"] for line in (run.folder / "evaluations.jsonl").read_text().splitlines()
    )
    assert first < 0.1
    assert last > first + 0.1
    told = [json.loads(line) for line in (run.folder / "evaluation_samples.jsonl").read_text().splitlines()]
    at_the_end = [each["text"] for each in told if each["step"] == told[-1]["step"]]
    assert len(set(at_the_end)) > 0.5 * len(at_the_end)

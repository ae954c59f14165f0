"""Small runs with the engine `vllm`: the samples are those of our own engine, in one process and in several."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from runs import invoke, train, write_data, write_job, write_models
from started import TWO, Started, eventually, hold_rewards
from vllm_children import python_with_vllm

from rlhfspec.engine.vllm.finding import INSTALL_VLLM, VARIABLE
from rlhfspec.tiny import random_model
from rlhfspec.tiny.tokenizer import VOCAB_SIZE

VLLM = "generation.engine=vllm"


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    write_models(folder, random_model("llama", seed=0, vocab_size=VOCAB_SIZE, head_dim=32))
    write_data(folder)
    return write_job(folder, folder)


def samples(job_file: Path, out: str) -> dict[str, list[Any]]:
    lines = map(json.loads, (job_file.parent / out / "samples.jsonl").read_text().splitlines())
    return {line["id"]: [line[name] for name in ("tokens", "text", "finish_reason", "reward")] for line in lines}


@pytest.fixture(scope="module")
def ours(job_file: Path) -> dict[str, list[Any]]:
    train(job_file, "ours")
    return samples(job_file, "ours")


def children(uid: str) -> list[int]:
    """The processes of vLLM of one run, or of all."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = ((folder / name).read_bytes() for name in ("cmdline", "environ"))
        except OSError:
            continue
        if b"inside/serve.py" in command and f"RLHFSPEC_RUN={uid}".encode() in environment:
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize("mode", ["off", "suffix"])
def test_samples_are_those_of_our_engine(job_file: Path, ours: dict[str, list[Any]], mode: str) -> None:
    python_with_vllm()
    train(job_file, f"vllm-{mode}", VLLM, f"generation.speculation.mode={mode}")
    assert len(ours) == 3 * 3 * 3
    assert samples(job_file, f"vllm-{mode}") == ours
    manifest = json.loads((job_file.parent / f"vllm-{mode}" / "manifest.json").read_text())
    assert manifest["models"]["generator"]["bits"] == "vllm-0.32-cpu"


def test_two_generators_lose_a_child_and_a_worker_and_no_sample(job_file: Path, ours: dict[str, list[Any]]) -> None:
    python_with_vllm()
    hold = hold_rewards(job_file, "1 several")
    run = Started(job_file, "several", VLLM, *TWO, "observability.traces=false")
    run.until("step 1/3")
    uid = run.connections["uid"]
    killed, kept = children(uid)
    os.kill(killed, signal.SIGKILL)
    os.kill(run.pid_of("generator", 1), signal.SIGKILL)
    eventually(lambda: len(set(children(uid)) - {killed, kept}) >= 1, "another child")
    hold.unlink()
    code, text = run.ended()
    assert code == 0, text
    assert samples(job_file, "several") == ours
    assert not children(uid), "nothing is left"


def test_without_vllm_one_line_says_what_to_install(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/nowhere/python")
    result = invoke(job_file, "none", VLLM)
    assert result.exit_code == 2
    assert INSTALL_VLLM in " ".join(result.output.split())
    assert not (job_file.parent / "none").exists()

"""Small runs with the engine `vllm` have our engine's samples, in one process and several."""

import json
from pathlib import Path
from typing import Any

import pytest
from faults import vllm as faults
from runs import answers_of, invoke, lines_of, train, with_spec, write_data, write_job, write_models
from vllm_children import python_with_vllm

from rlhfspec.engine.vllm.finding import INSTALL_VLLM, VARIABLE
from rlhfspec.engine.vllm.from_job import NO_DRAFTS, drafts_right
from rlhfspec.errors import StorageError
from rlhfspec.tiny import random_model, smollm2
from rlhfspec.tiny.tokenizer import VOCAB_SIZE

pytestmark = pytest.mark.timeout(900)  # a child is 12 s of a processor until it is there
VLLM = "generation.engine=vllm"


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    write_models(folder, random_model("llama", seed=0, vocab_size=VOCAB_SIZE, head_dim=32))
    write_data(folder)
    return write_job(folder, folder)


@pytest.fixture(scope="module")
def ours(job_file: Path) -> dict[str, list[Any]]:
    train(job_file, "ours")
    return answers_of(job_file.parent / "ours")


@pytest.mark.parametrize("mode", ["off", "suffix"])
def test_samples_of_vllm_are_those_of_our_engine(job_file: Path, ours: dict[str, list[Any]], mode: str) -> None:
    python_with_vllm()
    chosen = VLLM, f"generation.speculation.mode={mode}"
    if mode != "off" and not drafts_right("cpu"):
        assert NO_DRAFTS in " ".join(invoke(job_file, f"vllm-{mode}", *chosen).output.split())
        return
    train(job_file, f"vllm-{mode}", *chosen)
    assert len(ours) == 3 * 3 * 3
    assert answers_of(job_file.parent / f"vllm-{mode}") == ours
    manifest = json.loads((job_file.parent / f"vllm-{mode}" / "manifest.json").read_text())
    assert manifest["models"]["generator"]["bits"] == "vllm-0.32-cpu"


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_log_probs_of_vllm_match_the_trainer_after_every_weight_swap(tmp_path: Path, kind: str) -> None:
    python_with_vllm()
    write_models(tmp_path, random_model(kind, seed=0, vocab_size=VOCAB_SIZE, head_dim=32))
    write_data(tmp_path)
    job_file = write_job(tmp_path, tmp_path)
    train(job_file, "run", VLLM, "training.optimizer.learningRate=1e-2")
    steps = [json.loads(line)["log_prob_difference"] for line in lines_of(job_file, "run")]
    assert len(steps) == 3
    assert max(step["max"] for step in steps) < 1e-4, steps


def test_a_pretrained_model_in_vllm_matches_the_trainer_after_a_large_change(tmp_path: Path) -> None:
    """SmolLM2 has a tied head, which vLLM's own reload would leave at the weights of the start."""
    python_with_vllm()
    try:
        smollm2.ensure()
    except StorageError as error:
        pytest.skip(str(error))
    write_data(tmp_path)
    job_file = with_spec(
        write_job(tmp_path, tmp_path), model={"path": "smollm2", "drafter": None}, generation={"maxTokens": 8},
        training={"steps": 2, "promptsPerStep": 2, "optimizer": {"learningRate": 1e-3}},
    )  # fmt: skip
    train(job_file, "run", VLLM)
    steps = [json.loads(line)["log_prob_difference"] for line in lines_of(job_file, "run")]
    assert len(steps) == 2
    assert max(step["max"] for step in steps) < 3e-4, steps


def test_under_faults_samples_are_those_of_our_engine(tmp_path: Path) -> None:
    """Three kills while samples move between two generators; `make faults-vllm` does forty."""
    python_with_vllm()
    run = faults.trial(tmp_path, 5, 3, print, held_seconds=1.0)
    assert sum(number for what, number in run.struck.items() if what.startswith("kill")) == 3


def test_without_vllm_one_line_says_what_to_install(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/nowhere/python")
    assert INSTALL_VLLM in " ".join(invoke(job_file, "none", VLLM, code=2).output.split())
    assert not (job_file.parent / "none").exists()

"""Small runs with the engine `vllm`: the samples are those of our own engine, in one process and in several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from faults import vllm as faults
from runs import invoke, train, write_data, write_job, write_models
from vllm_children import python_with_vllm

from rlhfspec.engine.base import Request
from rlhfspec.engine.core import Engine
from rlhfspec.engine.vllm.client import VllmEngine
from rlhfspec.engine.vllm.finding import INSTALL_VLLM, VARIABLE
from rlhfspec.engine.vllm.from_job import NO_DRAFTS, drafts_right
from rlhfspec.huggingface.proof.check import OWN_BITS
from rlhfspec.tiny import random_model
from rlhfspec.tiny.tokenizer import VOCAB_SIZE

pytestmark = pytest.mark.timeout(900)  # a child is 12 s of a processor until it is there
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


@pytest.mark.parametrize("mode", ["off", "suffix"])
def test_samples_are_those_of_our_engine(job_file: Path, ours: dict[str, list[Any]], mode: str) -> None:
    python_with_vllm()
    chosen = VLLM, f"generation.speculation.mode={mode}"
    if mode != "off" and not drafts_right("cpu"):
        refused = invoke(job_file, f"vllm-{mode}", *chosen)
        assert NO_DRAFTS in " ".join(refused.output.split())
        return
    train(job_file, f"vllm-{mode}", *chosen)
    assert len(ours) == 3 * 3 * 3
    assert samples(job_file, f"vllm-{mode}") == ours
    manifest = json.loads((job_file.parent / f"vllm-{mode}" / "manifest.json").read_text())
    assert manifest["models"]["generator"]["bits"] == "vllm-0.32-cpu"


def test_generators_of_both_engines_make_the_samples_of_one(
    job_file: Path, ours: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them some, under the weights of every step."""
    python_with_vllm()
    calls: list[tuple[type, Any]] = []
    for kind in (VllmEngine, Engine):
        for name in ("submit", "load_weights"):
            monkeypatch.setattr(kind, name, noted(kind, name, calls))
    train(job_file, "both", "roles.generator.workers=2", "roles.generator.engines=[vllm, own]")
    assert samples(job_file, "both") == ours
    models = json.loads((job_file.parent / "both" / "manifest.json").read_text())["models"]
    assert models["generator-0"]["bits"] == "vllm-0.32-cpu"
    assert models["generator-1"]["bits"] == OWN_BITS
    for kind in (VllmEngine, Engine):
        given = [what for which, what in calls if which is kind]
        assert [what for what in given if isinstance(what, int)][:2] == [1, 2], "versions of weights"
        assert any(isinstance(what, Request) for what in given)


def noted(kind: type, name: str, calls: list[tuple[type, Any]]) -> Any:
    """The method, which notes the version or request that it is called with."""
    method = getattr(kind, name)

    def call(engine: Any, *given: Any, **named: Any) -> Any:
        calls.append((kind, named.get("version", given[0])))
        return method(engine, *given, **named)

    return call


def test_under_faults_samples_are_those_of_our_engine(tmp_path: Path) -> None:
    """Three kills while samples move between both kinds of engine; `make faults-vllm` does forty."""
    python_with_vllm()
    run = faults.trial(tmp_path, 5, 3, print, held_seconds=1.0)
    assert sum(number for what, number in run.struck.items() if what.startswith("kill")) == 3


def test_without_vllm_one_line_says_what_to_install(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/nowhere/python")
    result = invoke(job_file, "none", VLLM)
    assert result.exit_code == 2
    assert INSTALL_VLLM in " ".join(result.output.split())
    assert not (job_file.parent / "none").exists()

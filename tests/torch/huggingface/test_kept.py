"""Verdicts and costs kept between starts: found again for the same model, code and machine, and for no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhfspec.common import kept
from rlhfspec.engine import Engine, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.forward import runner
from rlhfspec.engine.scheduling import speculation
from rlhfspec.tiny import random_model
from rlhfspec.training.modeling import loading


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHFSPEC_KEPT", str(tmp_path))
    return tmp_path


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that were compared with Hugging Face."""
    asked: list[str] = []
    for module in (runner, loading):
        plain = module.ask

        def ask(*args: Any, _plain: Any = plain, **how: Any) -> Any:
            asked.append(how["name"])
            return _plain(*args, **how)

        monkeypatch.setattr(module, "ask", ask)
    return asked


def tokens(engine: Engine) -> list[Any]:
    prompts = [[3, 4, 5], [6, 7], [8]]
    return [done.token_ids for done in engine.generate(prompts, SamplingParams(max_tokens=12), seeds=[1, 2, 3])]


def engine(seed: int = 1, kind: str = "llama", **config: Any) -> Engine:
    return make_engine(random_model(kind, seed=seed), EngineConfig(max_context=64, max_sequences=4, **config))


@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi"])
def test_an_engine_is_proved_once_and_gives_the_same_tokens(proofs: list[str], kind: str) -> None:
    """The second start puts guards and decoder where the proof of the first did."""
    first = engine(kind=kind)
    asked = len(proofs)
    second = engine(kind=kind)
    assert (asked, len(proofs)) == (1, 1)
    runners = [each.state.target.runner for each in (first, second)]
    assert runners[0].report.path == runners[1].report.path
    assert (runners[0].native is None) == (runners[1].native is None)
    assert runners[0].report.guarded == runners[1].report.guarded
    assert tokens(first) == tokens(second)


@pytest.mark.parametrize(
    "changed", [{"seed": 2}, {"kind": "qwen2"}, {"dtype": "bfloat16"}, {"attention_split": 64}], ids=str
)
def test_a_changed_setting_is_proved_anew(proofs: list[str], changed: dict[str, Any]) -> None:
    engine()
    engine(**changed)
    assert len(proofs) == 2


def test_a_change_of_the_code_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kept.key_of("proof", 1)
    kept.this_program.cache_clear()
    monkeypatch.setattr(kept, "_is_code", lambda file: file.name == "kept.py")
    changed = kept.key_of("proof", 1)
    kept.this_program.cache_clear()
    assert before != changed


def test_the_trainers_model_is_proved_once(proofs: list[str]) -> None:
    for _ in range(2):
        loading.prepared(random_model("llama", seed=1))
    loading.prepared(random_model("llama", seed=1), dtype="bfloat16")
    assert len(proofs) == 2


def test_costs_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[object] = []
    plain = speculation.profile
    monkeypatch.setattr(speculation, "profile", lambda state: (measured.append(state), plain(state))[1])
    first, second = engine(speculation="suffix"), engine(speculation="suffix")
    assert len(measured) == 1
    costs = [{k: table.to_dict() for k, table in each.speculation.costs.tables.items()} for each in (first, second)]
    assert costs[0] == costs[1]


def test_a_bad_file_or_folder_costs_one_proof(folder: Path, proofs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    engine()
    for file in folder.iterdir():
        file.write_text(file.read_text()[:-9])
    engine()
    assert len(proofs) == 2
    (folder / "taken").write_text("")
    monkeypatch.setenv("RLHFSPEC_KEPT", str(folder / "taken"))
    engine()
    assert len(proofs) == 3
    assert json.loads(next(folder.glob("proof-*")).read_text())["report"]["model"] == "LlamaForCausalLM"

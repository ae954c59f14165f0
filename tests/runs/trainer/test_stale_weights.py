"""A run whose engine ignores part of the new weights fails."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from runs import invoke, lines_of, write_data, write_job, write_models

from rlhfspec.engine.core import Engine
from rlhfspec.tiny import random_model
from rlhfspec.tiny.tokenizer import VOCAB_SIZE

HEAD = "lm_head.weight"


def test_an_engine_that_keeps_its_old_head_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama", seed=0, vocab_size=VOCAB_SIZE)
    write_models(tmp_path, model)
    write_data(tmp_path)
    job_file, head, load = write_job(tmp_path, tmp_path), model.state_dict()[HEAD], Engine.load_weights

    def load_all_but_the_head(engine: Engine, state_dict: Mapping[str, Any], *, version: int) -> None:
        load(engine, {**state_dict, HEAD: head}, version=version)

    monkeypatch.setattr(Engine, "load_weights", load_all_but_the_head)
    result = invoke(job_file, "run", "generation.speculation.mode=off")
    assert result.exit_code == 1
    assert "own: step 2: its log-probs differ from the trainer's" in " ".join(result.output.split())
    assert len(lines_of(job_file, "run")) == 1

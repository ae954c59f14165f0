from pathlib import Path

import pytest
import torch
from places import ROOT
from runs import command

from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.tiny import random_model
from rlhfspec.tiny.tokenizer import VOCAB_SIZE, hugging_face_tokenizer

EXAMPLES = ROOT / "examples"


JOBS = sorted(path.name for path in EXAMPLES.glob("*.yaml"))


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an untrained start, as training one takes most of a minute."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    random_model("llama", seed=0, vocab_size=VOCAB_SIZE).save_pretrained(folder)
    hugging_face_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("name", JOBS)
def test_an_example_runs(name: str, untrained: Path, tmp_path: Path) -> None:
    smaller = {"model.path": untrained, "training.steps": 2, "training.promptsPerStep": 4}
    smaller |= {"generation.maxTokens": 20, "observability.view": "off"}
    options = [part for path, value in smaller.items() for part in ("--set", f"{path}={value}")]
    command(["run", str(EXAMPLES / name), "--out", str(tmp_path / "out"), *options], 0)
    assert [metrics.step for metrics in RunFolder(tmp_path / "out").steps()] == [1, 2]

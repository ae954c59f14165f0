"""Modules that must not import torch, transformers or matplotlib, each checked in a new process."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlhfspec.messages.loop import STAGES

WORDS = [
    *(f"rlhfspec.{stage.name}.build" for stage in STAGES),
    *(f"rlhfspec.stage.{name}" for name in ("bus", "context", "supervisor")),
    "rlhfspec.messages.wire.codec", "rlhfspec.messages.transport.memory", "rlhfspec.engine", "rlhfspec.cli.main",
    "rlhfspec.bench.commands.models",
]  # fmt: skip
VIEW = [f"rlhfspec.runs.{name}" for name in ("view.view", "view.summary", "folder.trackers")]


@pytest.mark.parametrize(
    ("modules", "without"),
    [
        (WORDS, {"torch", "transformers"}),
        (["rlhfspec.plugin.main"], {"torch", "kubernetes", "grpc"}),
        (VIEW, {"torch", "matplotlib", "tensorboard"}),
    ],
    ids=["words", "plugin", "view"],
)
def test_what_is_imported_imports_no(modules: list[str], without: set[str]) -> None:
    code = f"import sys, {', '.join(modules)}; sys.exit(bool({without} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_wrappers_needs_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import rlhfspec.kernels.kv_pack, rlhfspec.kernels.tree_attention"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_command_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 20)
    code = (
        "import sys; from typer.testing import CliRunner; from rlhfspec.cli.main import app\n"
        "for words in sys.argv[1:]:\n"
        "    assert CliRunner().invoke(app, words.split()).exit_code == 0, words\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    job = tmp_path / "job.yaml"
    init = f"init {job} --model ./model --data ./train.jsonl"
    commands = [init, f"validate {job}", f"init {job} --force", f"validate {job}", "schema", "schema --crd"]
    subprocess.run([sys.executable, "-c", code, *commands], check=True, timeout=60)

"""What must not import torch, transformers or matplotlib: each is asked in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rlhfspec.messages.loop import STAGES

BUILDERS = [f"rlhfspec.{stage.name}.build" for stage in STAGES]


def test_importing_a_builder_imports_no_torch() -> None:
    """Nor does the context, the map, or what the command line needs to show its help."""
    names = [*BUILDERS, "rlhfspec.stage.context", "rlhfspec.messages.loop", "rlhfspec.cli.main"]
    code = f"import sys, {', '.join(names)}\nprint([name for name in ('torch', 'transformers') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_the_command_line_starts_without_torch() -> None:
    code = "import rlhfspec.cli.main, rlhfspec.engine, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_wire_needs_no_torch() -> None:
    messages = "rlhfspec.messages.wire.codec, rlhfspec.messages.transport.memory"
    modules = f"{messages}, rlhfspec.stage.supervisor, rlhfspec.stage.bus"
    subprocess.run([sys.executable, "-c", f"import {modules}, sys; sys.exit('torch' in sys.modules)"], check=True)


def test_it_starts_without_torch_and_helps_without_kubernetes() -> None:
    code = "import rlhfspec.plugin.main, sys; sys.exit(bool({'torch', 'kubernetes', 'grpc'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_telemetry_needs_neither_torch_nor_matplotlib() -> None:
    code = (
        "import rlhfspec.runs.view.view, rlhfspec.runs.view.summary, rlhfspec.runs.folder.trackers, sys\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib', 'tensorboard')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_is_started_without_torch() -> None:
    code = "import sys; import rlhfspec.bench.commands.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


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


def test_importing_the_wrappers_needs_no_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import rlhfspec.kernels.kv_pack, rlhfspec.kernels.tree_attention
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

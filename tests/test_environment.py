"""Commands in environments that are not as usual: they work as ever, or one line says what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # what a locale that is not UTF-8 does


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlhfspec.cli.start", *arguments],
        capture_output=True, encoding="utf-8", env=os.environ | environment, timeout=120, check=False,
    )  # fmt: skip


def test_names_and_contents_are_utf_8_in_every_locale(job_file: Path) -> None:
    folder = job_file.parent / "über 数据"
    folder.mkdir()
    (folder / "dä ta.jsonl").write_text('{"prompt": "über 数据", "answer": "✓"}\n' * 6, encoding="utf-8")
    (folder / "rewards.py").write_text((job_file.parent / "rewards.py").read_text() + "# ✓\n", encoding="utf-8")
    job = yaml.safe_load(job_file.read_text())
    job["spec"]["dataset"]["path"] = "./dä ta.jsonl"
    path = folder / "jöb ✓.yaml"
    path.write_text(yaml.safe_dump(job, allow_unicode=True), encoding="utf-8")
    done = command("validate", str(path), **C_LOCALE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "jöb ✓.yaml: valid" in done.stdout
    assert "dä ta.jsonl, 6 rows" in done.stdout


def test_an_interpreter_without_docstrings_is_refused_in_one_line(job_file: Path) -> None:
    done = command("run", str(job_file), PYTHONOPTIMIZE="2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("python -OO (PYTHONOPTIMIZE=2): transformers does not work without docstrings; -O does\n")


def test_an_interpreter_without_asserts_will_do(job_file: Path) -> None:
    done = command("validate", str(job_file), PYTHONOPTIMIZE="1")
    assert done.returncode == 0, done.stderr

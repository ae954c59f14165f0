"""Lookup of a Python with vLLM: from the job, an environment variable, `.venv-vllm` or the PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "RLHFSPEC_VLLM_PYTHON"
FOLDER = ".venv-vllm"
INSTALL_VLLM = (
    f"vLLM is not installed: `make setup-vllm` makes {FOLDER}, or name the Python of an environment that has it in "
    f"generation.engine.arguments.python or {VARIABLE}"
)
_HAS_VLLM = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"


def find_python(given: str | None, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the first Python with vLLM, or None. If one is named, no other is tried."""
    named = given or environment.get(VARIABLE)
    if named is not None:
        return Path(named) if _has_vllm(Path(named)) else None
    folders = dict.fromkeys((Path.cwd(), *Path(__file__).parents, Path(sys.prefix).parent))
    candidates = [folder / FOLDER / "bin" / "python" for folder in folders]
    in_path = shutil.which("vllm", path=environment.get("PATH"))
    if in_path is not None:
        candidates.append(Path(in_path).resolve().with_name("python"))
    return next((each for each in candidates if _has_vllm(each)), None)


def what_is_missing(arguments: Mapping[str, object]) -> str | None:
    given = arguments.get("python")
    return None if find_python(None if given is None else str(given)) is not None else INSTALL_VLLM


def _has_vllm(python: Path) -> bool:
    if not os.access(python, os.X_OK):
        return False
    try:
        return subprocess.run([python, "-c", _HAS_VLLM], check=False, timeout=60, capture_output=True).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False

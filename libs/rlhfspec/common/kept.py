"""Cache of results between process starts, in `$RLHFSPEC_CACHE/kept` or `$RLHFSPEC_KEPT` (empty: no cache)."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import secrets
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import rlhfspec

log = logging.getLogger(__name__)
_LIBRARIES = ("torch", "transformers", "numpy")
_OF_A_CPU = ("model name", "flags", "CPU part", "Features")  # lines of /proc/cpuinfo


def key_of(kind: str, *parts: object) -> str:
    """Return the cache key of a result, from its kind, the repr of `parts`, this code and this machine."""
    return f"{kind}-{_digest(repr((this_program(), *parts)).encode())}"


def read(key: str) -> Any:
    """Return the result kept under the key, or None."""
    folder = _folder()
    with suppress(OSError, ValueError):
        return None if folder is None else json.loads((folder / f"{key}.json").read_bytes())
    return None


def write(key: str, result: Mapping[str, Any]) -> None:
    """Keep a result as JSON under the key, if the folder can be written."""
    folder = _folder()
    if folder is None:
        return
    scratch = folder / f".{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(result))
        scratch.replace(folder / f"{key}.json")
    except OSError as error:
        log.debug("cannot save this result for the next start: %s", error)


@cache
def this_program() -> str:
    """Return a digest of this package's files, the libraries' versions and the CPU."""
    files = sorted(file for root in rlhfspec.__path__ for file in Path(root).rglob("*") if _is_code(file))
    code = [(file.name, _digest(file.read_bytes())) for file in files]
    versions = [importlib.metadata.version(name) for name in _LIBRARIES]
    return _digest(repr((code, versions, platform.python_version(), _cpu())).encode())


def _is_code(file: Path) -> bool:
    return file.suffix in (".py", ".cpp", ".h")


def _cpu() -> list[str]:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return sorted({line for line in lines if line.startswith(_OF_A_CPU)})
    return [platform.processor()]


def _folder() -> Path | None:
    named = os.environ.get("RLHFSPEC_KEPT")
    if named is not None:
        return Path(named) if named else None
    with suppress(RuntimeError):  # neither HOME nor an entry of this user
        return Path(os.environ.get("RLHFSPEC_CACHE", "~/.cache/rlhfspec")).expanduser() / "kept"
    return None


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()

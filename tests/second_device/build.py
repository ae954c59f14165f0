"""Build of the second device, cached under `$RLHFSPEC_CACHE` by sources, compiler and torch."""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch
from torch.utils import cpp_extension

_SOURCE = Path(__file__).with_name("second.cpp")
_FLAGS = ("-std=c++20", "-O0", "-shared", "-fPIC", "-w")


class Unavailable(Exception):
    """Raised if this machine has no second device; the message is the reason."""


@functools.cache
def library() -> Path:
    """Return the library of the present sources; the first build takes some 20 seconds."""
    compiler = next((path for name in ("g++", "c++") if (path := shutil.which(name))), None)
    if compiler is None:
        raise Unavailable("no C++ compiler, which the second device is built with")
    if torch.version.__version__.split("+")[0].split(".")[:2] < ["2", "13"]:
        raise Unavailable(f"the second device is written for torch 2.13, not {torch.__version__}")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256(f"{torch.__version__} {version} {_FLAGS}".encode() + _SOURCE.read_bytes()).hexdigest()[:24]
    folder = Path(os.environ.get("RLHFSPEC_CACHE", "~/.cache/rlhfspec")).expanduser() / "second_device"
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / f"{key}.so"
    with (folder / "lock").open("w") as lock:  # of two processes one builds and the other waits
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _compile(compiler, built)
    return built


def _compile(compiler: str, built: Path) -> None:
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    unfinished = built.with_suffix(".unfinished")
    command = [compiler, *_FLAGS, abi, *includes, str(_SOURCE), "-o", str(unfinished), *libraries]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, f"the second device does not compile:\n{done.stderr[:2000]}"
    unfinished.replace(built)

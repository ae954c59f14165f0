"""Building and loading of the C++ kernels: one library for all instruction sets, cached by content.

Every `csrc/*.cpp` is compiled for AVX2 and AVX-512; an exported `name` becomes `name_avx2` and `name_avx512`. Files
`*_amx`, `*_avx512bf16`, `*_avx512vnni` and `*_base` (any x86-64) are compiled for that set only. `$RLHFSPEC_CACHE`
(default ~/.cache/rlhfspec) holds the library. Without a library, plain torch runs.

    RLHFSPEC_NATIVE=0              never use the kernels
    RLHFSPEC_KERNEL_LIBRARY=FILE   use this one (container images prebuild: python -m rlhfspec.kernels.cpu.build)
    RLHFSPEC_ISA=avx2|avx512       force the instruction set
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("rlhfspec.kernels")
SOURCE_DIR = Path(__file__).parent / "csrc"
# Never -Ofast or -ffast-math: at link time they switch the whole process to flush-to-zero. No contraction: only
# explicit fused multiply-adds, so that every instruction set gives the same bits.
COMMON_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-fvisibility=hidden")
AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "base": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": AVX512_FLAGS,
    "amx": (*AVX512_FLAGS, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "avx512bf16": (*AVX512_FLAGS, "-mavx512bf16"),
    "avx512vnni": (*AVX512_FLAGS, "-mavx512vnni"),
}
ISA_FEATURES: dict[str, frozenset[str]] = {  # as /proc/cpuinfo spells them
    "base": frozenset(),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"}),
    "amx": frozenset({"amx_tile", "amx_bf16", "avx512_bf16", "avx512f", "avx512bw", "avx512vl", "avx512dq"}),
    "avx512bf16": frozenset({"avx512_bf16", "avx512f", "avx512bw", "avx512vl", "avx512dq"}),
    "avx512vnni": frozenset({"avx512_vnni", "avx512f", "avx512bw", "avx512vl", "avx512dq"}),
}
GENERAL_ISAS = ("avx512", "avx2")  # best first; every file without an instruction set in its name has both


class BuildError(RuntimeError):
    """Error of the C++ compiler; the message is its first diagnostic."""


@functools.cache
def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    first = path.read_text().split("\n\n", 1)[0] if path.exists() else ""
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def cpu_features() -> frozenset[str]:
    return frozenset(_cpuinfo().get("flags", "").split())


def cpu_vendor() -> str:
    return _cpuinfo().get("vendor_id", "")


def cpu_name() -> str:
    return _cpuinfo().get("model name", platform.machine())


def supports(isa: str) -> bool:
    return ISA_FEATURES[isa] <= cpu_features()


def best_isa() -> str | None:
    """Return the instruction set of the general kernels: RLHFSPEC_ISA, else this CPU's best, or None if it has none."""
    forced = os.environ.get("RLHFSPEC_ISA")
    if forced is None:
        return next((isa for isa in GENERAL_ISAS if supports(isa)), None)
    if forced not in GENERAL_ISAS or not supports(forced):
        have = [isa for isa in GENERAL_ISAS if supports(isa)]
        raise ValueError(f"RLHFSPEC_ISA: must be one of {have} on this CPU (got {forced!r})")
    return forced


def _compiler() -> str | None:
    names = (os.environ.get("CXX"), "g++", "c++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


@functools.cache
def _compiler_version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


def _cache_dir() -> Path:
    try:
        return Path(os.environ.get("RLHFSPEC_CACHE", "~/.cache/rlhfspec")).expanduser() / "kernels"
    except RuntimeError:  # neither HOME nor a passwd entry for this user
        raise BuildError("this user has no home folder: set RLHFSPEC_CACHE") from None


def _isas_of(source: Path) -> tuple[str, ...]:
    special = [isa for isa in ISA_FLAGS if isa not in GENERAL_ISAS and source.stem.endswith(f"_{isa}")]
    return tuple(special) or GENERAL_ISAS


def _units() -> list[tuple[Path, str]]:
    return [(source, isa) for source in sorted(SOURCE_DIR.glob("*.cpp")) for isa in _isas_of(source)]


def _with_headers(source: Path) -> list[Path]:
    """Return a source file and all project headers that it includes, transitively."""
    found = [source]
    for path in found:  # grows during the loop
        names = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
        found += [SOURCE_DIR / name for name in names if SOURCE_DIR / name not in found]
    return found


def _unit_key(compiler: str, source: Path, isa: str) -> str:
    """Return an object file's cache key, a hash of compiler, flags, source and headers."""
    digest = hashlib.sha256()
    for text in (_compiler_version(compiler), " ".join((*COMMON_FLAGS, *ISA_FLAGS[isa])), isa):
        digest.update(text.encode())
    for path in _with_headers(source):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def _run_compiler(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.splitlines()
        raise BuildError(next((line for line in lines if "error" in line), done.stderr[:200]))


def _publish(path: Path, make: Callable[[str], None]) -> None:
    """Let `make` write a temporary file, then rename it to `path`, because two processes may build at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    os.close(handle)
    try:
        make(temporary)
        os.chmod(temporary, 0o755)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _compile(compiler: str, source: Path, isa: str, path: Path) -> None:
    if not path.exists():
        flags = [*COMMON_FLAGS, *ISA_FLAGS[isa], f"-DRS_ISA={isa}"]
        _publish(path, lambda out: _run_compiler([compiler, *flags, "-c", str(source), "-o", out]))


def build() -> Path:
    """Return the path of the current sources' library, building it if needed. Raise BuildError on failure."""
    compiler = _compiler()
    if compiler is None:
        raise BuildError("no C++ compiler (g++ or $CXX) found")
    units = _units()
    keys = [_unit_key(compiler, source, isa) for source, isa in units]
    library = _cache_dir() / f"{hashlib.sha256(' '.join(keys).encode()).hexdigest()[:24]}.so"
    if library.exists():
        return library
    print("rlhfspec: building the CPU kernels (once) ...", file=sys.stderr, flush=True)
    objects = [_cache_dir() / "objects" / f"{key}.o" for key in keys]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(_compile, compiler, *unit, path) for unit, path in zip(units, objects, strict=True)]
        for job in jobs:
            job.result()
    inputs = [str(path) for path in objects]
    _publish(library, lambda out: _run_compiler([compiler, "-shared", *inputs, "-o", out]))
    return library


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("RLHFSPEC_NATIVE", "1") == "0":
        return None, "switched off by RLHFSPEC_NATIVE=0"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None, f"no kernels for {sys.platform} on {platform.machine()}"
    if best_isa() is None:
        return None, "this CPU has no AVX2"
    prebuilt = os.environ.get("RLHFSPEC_KERNEL_LIBRARY")
    if prebuilt:
        return ctypes.CDLL(prebuilt), ""  # requested by name: a missing or broken file must raise
    try:
        return ctypes.CDLL(str(build())), ""
    except BuildError as error:
        reason = str(error)
    except OSError as error:  # also raised for a cache on a noexec file system
        reason = f"{error} (set RLHFSPEC_CACHE to another folder)"
    log.warning("rlhfspec: no CPU kernels, using plain torch: %s", reason)
    return None, reason


def load() -> ctypes.CDLL | None:
    """Return the kernel library, or None (see `unavailable_reason`)."""
    return _load()[0]


def unavailable_reason() -> str:
    return _load()[1]


def function(name: str, isa: str | None = None) -> Any:
    """Return the ctypes function `name` for `isa` (default: best), None without a library. Callers set `argtypes`."""
    library = load()
    if library is None:
        return None
    found = getattr(library, f"{name}_{isa or best_isa()}")
    found.restype = None
    return found


def check_sizes(name: str, *sizes: int) -> None:
    """Raise RuntimeError unless structs of csrc/`name`.cpp have the sizes of their Python mirrors."""
    there = (ctypes.c_long * len(sizes))()
    function(f"{name}_sizes")(there)
    if tuple(there) != sizes:
        raise RuntimeError(f"{name}.cpp: its structs have {tuple(there)} bytes, Python's mirrors of them {sizes}")


_num_threads: int | None = None


def num_threads() -> int:
    return _num_threads if _num_threads is not None else torch.get_num_threads()


def set_num_threads(count: int | None) -> None:
    """Set the number of kernel threads (None: torch's). Results never depend on it."""
    global _num_threads
    if count is not None and count < 1:
        raise ValueError(f"num_threads: must be >= 1 (got {count})")
    _num_threads = count


if __name__ == "__main__":
    print(build())

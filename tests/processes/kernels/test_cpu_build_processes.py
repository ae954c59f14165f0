"""Build, lookup and switch-off of the CPU kernels, in new processes."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.malloc import tune_malloc

needs_library = pytest.mark.skipif(build.load() is None, reason=f"no kernel library: {build.unavailable_reason()}")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RLHFSPEC_NATIVE": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


REPORT = "from rlhfspec.kernels.cpu import build; print(build.load() is None, build.unavailable_reason(), sep='|')"


def test_native_kernels_can_be_switched_off() -> None:
    done = run_python(REPORT, RLHFSPEC_NATIVE="0")
    assert done.stdout.strip() == "True|switched off by RLHFSPEC_NATIVE=0", done.stderr


def test_no_compiler_is_a_reason_not_an_error(tmp_path: Path) -> None:
    done = run_python(REPORT, RLHFSPEC_CACHE=str(tmp_path), PATH="/nowhere", CXX="", RLHFSPEC_KERNEL_LIBRARY="")
    assert done.stdout.startswith("True|"), done.stderr
    assert "no C++ compiler" in done.stdout or build.best_isa() is None


@needs_library
def test_a_prebuilt_library_needs_no_compiler(tmp_path: Path) -> None:
    library = build.build()
    code = "from rlhfspec.kernels.cpu import build; print(build.load()._name)"
    done = run_python(code, RLHFSPEC_CACHE=str(tmp_path), PATH="/nowhere", CXX="", RLHFSPEC_KERNEL_LIBRARY=str(library))
    assert done.stdout.strip() == str(library), done.stderr


def test_a_missing_prebuilt_library_is_an_error() -> None:
    if build.load() is None:
        pytest.skip("no kernels for this machine")
    assert "nowhere.so" in run_python(REPORT, RLHFSPEC_KERNEL_LIBRARY="/nowhere.so").stderr


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if build._compiler() is None or build.best_isa() is None:
        pytest.skip("no C++ compiler, or not an x86 CPU")
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.h").write_text("enum { answer = 42 };\n")
    (folder / "tiny.cpp").write_text(
        '#include "answer.h"\n#define J_(a, b) a##_##b\n#define J(a, b) J_(a, b)\n'
        'extern "C" __attribute__((visibility("default"))) int J(tiny, RS_ISA)() { return answer; }\n'
    )
    monkeypatch.setattr(build, "SOURCE_DIR", folder)
    monkeypatch.setenv("RLHFSPEC_CACHE", str(tmp_path / "cache"))
    return folder


def tiny_answer(library: Path) -> int:
    return int(getattr(ctypes.CDLL(str(library)), f"tiny_{build.best_isa()}")())


def test_two_processes_may_build_at_once(sources: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rlhfspec.kernels.cpu import build;"
        "build.SOURCE_DIR = Path(sys.argv[1]); print(build.build())"
    )
    command = [sys.executable, "-c", code, str(sources)]
    jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {job.communicate()[0].strip() for job in jobs}
    assert [job.returncode for job in jobs] == [0, 0]
    assert len(paths) == 1
    assert tiny_answer(Path(paths.pop())) == 42
    assert [path.name for path in build._cache_dir().iterdir() if path.name.startswith("tmp")] == []


ARENAS = """
import atexit, ctypes, sys, threading
from rlhfspec.cli.start import main

def allocate(together):
    together.wait()
    for _ in range(50):
        libc.malloc(5000)

@atexit.register
def count():
    global libc
    assert not {"torch", "numpy"} & {*sys.modules}
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    together = threading.Barrier(8)
    threads = [threading.Thread(target=allocate, args=(together,)) for _ in range(8)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
    libc.fflush(None)

sys.argv = ["rlhfspec", "--version"]
main()
"""


@pytest.mark.skipif(not tune_malloc(), reason="the C library is not glibc: its allocator has no such settings")
def test_malloc_uses_one_arena_for_all_threads_of_a_command() -> None:
    """The setting takes effect before torch, and before any thread gets its own arena."""
    done = run_python(ARENAS)
    assert done.stdout.count("<heap nr=") == 1, done.stdout + done.stderr


def test_a_build_is_announced_once_and_then_cached(sources: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = build.build()
    assert "building" in capfd.readouterr().err
    assert tiny_answer(first) == 42
    assert build.build() == first
    assert capfd.readouterr().err == ""


def test_a_changed_header_is_a_new_library(sources: Path) -> None:
    first = build.build()
    (sources / "answer.h").write_text("enum { answer = 43 };\n")
    second = build.build()
    assert second != first
    assert (tiny_answer(first), tiny_answer(second)) == (42, 43)


def test_a_compile_error_is_reported_by_its_first_complaint(sources: Path) -> None:
    (sources / "broken.cpp").write_text("int nonsense = ;\n")
    with pytest.raises(build.BuildError, match=r"broken\.cpp:1:.*error"):
        build.build()

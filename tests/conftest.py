"""Settings and fixtures of all tests, applied before torch, triton or matplotlib are imported."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("RLHFSPEC_KEPT", "")  # models are proved at every load
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not Path("/dev/nvidia0").exists():  # without a GPU, Triton kernels run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings
from object_stores import ObjectServer
from runs import write_data, write_job, write_models
from shared_servers import SharedServers
from started import Started

pytest_plugins = ["coroutines", "on_device", "pictures", "proved_once", "same_environment", "skips", "sweeps", "tiers"]

# Deterministic examples and no per-example deadline: a busy machine must not fail a correct test.
settings.register_profile("default", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("whole", deadline=None, derandomize=True, max_examples=250)
settings.load_profile("default")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlhfspec.tiny import random_model
    from rlhfspec.tiny.tokenizer import VOCAB_SIZE

    folder = tmp_path_factory.mktemp("models")
    write_models(folder, random_model("llama", seed=0, vocab_size=VOCAB_SIZE))
    return folder


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    from rlhfspec.kernels.cpu import build

    yield build.set_num_threads
    build.set_num_threads(None)


@pytest.fixture
def job_file(tmp_path: Path, models: Path) -> Path:
    write_data(tmp_path)
    return write_job(tmp_path, models)


@pytest.fixture
def starting(job_file: Path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def start(out: str, *overrides: str, **how: Any) -> Started:
        started.append(Started(job_file, out, *overrides, **how))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            run.process.kill()
        run.process.communicate()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "2m") as disk:
        yield disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "32m") as disk:
        yield disk


@contextmanager
def mounted(disk: Path, size: str) -> Iterator[Path]:
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if (done := subprocess.run(command, capture_output=True, text=True)).returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield disk
    finally:
        # Lazy: what a test that failed has left may write there for a moment, and must not stand in the next one's way.
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture(scope="session")
def object_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with ObjectServer(tmp_path_factory.mktemp("s3") / "buckets") as server:
        yield server


@pytest.fixture
def object_credentials(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in object_server.variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServers]:
    with SharedServers(tmp_path_factory.mktemp("release")) as servers:
        yield servers

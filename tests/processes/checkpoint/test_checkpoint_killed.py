"""Saving a checkpoint survives kills and a full disk."""

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import warmed

from rlhfspec.training.checkpoint import CheckpointStore
from rlhfspec.training.checkpoint.learnt import read_learnt, write_learnt


def state(step: int) -> dict[str, Any]:
    weight = torch.full((64, 64), float(step))
    return {"step": step, "policy": {"weight": weight}, "optimizer": {"state": {0: {"step": torch.tensor(step)}}}}


def check(loaded: Any, step: int) -> None:
    assert loaded["step"] == step
    assert torch.equal(loaded["policy"]["weight"], torch.full((64, 64), float(step)))
    assert loaded["optimizer"]["state"][0]["step"].item() == step


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def save_for_ever(folder: Path, pipe: int) -> None:
    try:
        with CheckpointStore(folder, keep=2) as store:
            step = store.latest() or 0
            while True:
                step += 1
                store.save(step, state(step))
                os.write(pipe, f"{step}\n".encode())
    finally:
        os._exit(1)


def write_learnt_for_ever(folder: Path, pipe: int) -> None:
    try:
        version = (read_learnt(folder) or (0,))[0]
        while True:
            version += 1
            write_learnt(folder, version, {"weight": torch.full((64, 64), float(version))}, by="generator-0")
            os.write(pipe, f"{version}\n".encode())
    finally:
        os._exit(1)


def killed_at_some_moments(draw: random.Random, save: Callable[[Path, int], None], folder: Path) -> Iterator[int]:
    """Yield, after each kill, the last announced step."""
    announced = 0
    for _ in range(20):
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            save(folder, writing)
        os.close(writing)
        with os.fdopen(reading) as lines:
            for _ in range(1 + draw.randrange(4)):
                announced = int(lines.readline())
            for _ in range(draw.randrange(1000)):  # a moment that no clock decides
                os.sched_yield()
            os.kill(process, signal.SIGKILL)
            announced = max([announced, *map(int, lines.readlines())])
        assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
        yield announced


def test_a_kill_at_any_moment_loses_nothing(folder: Path) -> None:
    for announced in killed_at_some_moments(random.Random(7), save_for_ever, folder):
        with CheckpointStore(folder, keep=2) as store:
            assert store.latest() in (announced, announced + 1)
            check(store.load(store.latest() or 0), store.latest() or 0)


def test_a_kill_while_it_is_written_leaves_what_was_learnt_whole(folder: Path) -> None:
    for announced in killed_at_some_moments(random.Random(8), write_learnt_for_ever, folder):
        found = read_learnt(folder)
        assert found is not None
        assert found[0] in (announced, announced + 1)
        assert torch.equal(found[1]["weight"], torch.full((64, 64), float(found[0])))


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """The kernel limits files to 8 KiB, so the tensors' file cannot be completed."""
    code = """
import pathlib, resource, sys, torch
from rlhfspec.training.checkpoint import CheckpointStore
from rlhfspec.errors import StorageError
with CheckpointStore(pathlib.Path(sys.argv[1]), keep=2) as store:
    store.save(1, {"policy": {"weight": torch.ones(4)}})
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    try:
        store.save(2, {"policy": {"weight": torch.ones(100_000)}})
    except StorageError as error:
        print(error)
    print(store.latest(), store.load(1)["policy"]["weight"].sum().item())
"""
    done = warmed.run([sys.executable, "-c", code, str(tmp_path / "c")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    message, after = done.stdout.splitlines()
    assert "the checkpoint of step 2 could not be written, earlier ones are untouched" in message
    assert "File too large" in message
    assert after == "1 4.0"
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [".lock", "step-00000001"]

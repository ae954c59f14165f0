"""Checkpoints survive kills and a full disk, and resume on any number of ranks."""

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import warmed
from checkpoints import check, state
from learners import critic, policy, rollouts, same_states, spec
from rank_sets import run_ranks

from rlhfspec.errors import StorageError
from rlhfspec.training.checkpoint import CheckpointStore
from rlhfspec.training.checkpoint.learnt import read_learnt, write_learnt
from rlhfspec.training.learning.learner import Learner


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


def test_a_kill_while_writing_leaves_the_learnt_state_whole(folder: Path) -> None:
    for announced in killed_at_some_moments(random.Random(8), write_learnt_for_ever, folder):
        found = read_learnt(folder)
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


SETS = ((4, "auto"), (2, "auto"), (1, "off"), (2, "off"))  # of two ranks, a model each and shares of both


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shares")
    for step, (num_ranks, fuse) in enumerate(SETS, start=1):
        run_ranks("resuming_ranks", num_ranks, str(folder), str(step), fuse)
    return folder


def loaded(folder: Path, step: int) -> Any:
    with CheckpointStore(folder / "checkpoints", keep=9) as store:
        return store.load(step)["learner"]


def test_shares_of_ranks_together_are_the_gathered_state(found: Path) -> None:
    state = loaded(found, 1)
    assert state["policy_optimizer"]["state"].keys() == {str(n) for n in range(len(state["policy"]))}
    same_states(state, torch.load(found / "whole.pt", weights_only=True))


@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_checkpoint_of_any_number_of_ranks_loads_the_same_bits(found: Path, step: int) -> None:
    same_states(loaded(found, step), loaded(found, 1))


def test_each_rank_writes_its_own_file_and_a_single_rank_one_file(found: Path) -> None:
    def files(step: int) -> list[str]:
        folder = found / "checkpoints" / f"step-{step:08d}"
        assert json.loads((folder / "manifest.json").read_text())["files"].keys() == {
            path.name for path in folder.iterdir() if path.name != "manifest.json"
        }
        return sorted(path.name.removesuffix(".safetensors") for path in folder.iterdir() if path.suffix != ".json")

    assert files(1) == ["learner", *(f"learner-0000{rank}-of-00004" for rank in range(4))]
    assert files(2) == ["learner", "learner-00001-of-00002"]
    assert files(3) == ["learner"]
    assert files(4) == ["learner", "learner-00000-of-00002", "learner-00001-of-00002"]


def test_a_rank_writes_its_share_and_no_more(found: Path) -> None:
    folder = found / "checkpoints" / "step-00000001"
    sizes = [path.stat().st_size for path in sorted(folder.glob("learner-*"))]
    whole = (found / "checkpoints" / "step-00000003" / "learner.safetensors").stat().st_size
    assert max(sizes) < 0.3 * whole
    assert sum(sizes) < 1.3 * whole  # headers of small tensors


def test_the_step_after_a_resume_equals_that_of_one_rank(found: Path) -> None:
    learner = Learner(spec("ppo", tokensPerMicroBatch=40, fuse="off"), policy(), critic(), num_threads=1)
    learner.load_state(loaded(found, 1))
    report = learner.learn(rollouts(1))
    for step, exact in ((2, True), (3, True), (4, False)):
        theirs = torch.load(found / f"next-{step}.pt", weights_only=True)
        for name, tensor in learner.policy_state().items():
            assert torch.equal(theirs["policy"][name], tensor) or not exact, (step, name)
            assert (theirs["policy"][name] - tensor).abs().max() < 1e-6, (step, name)
        assert theirs["metrics"]["policy_loss"] == pytest.approx(report.metrics["policy_loss"], abs=1e-6)


@pytest.fixture
def copied(found: Path, tmp_path: Path) -> Path:
    shutil.copytree(found / "checkpoints", tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def test_a_lost_or_damaged_share_is_named(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    lost = copied / "step-00000004" / "learner-00001-of-00002.safetensors"
    lost.unlink()
    damaged = copied / "step-00000001" / "learner-00002-of-00004.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with CheckpointStore(copied, keep=9) as store:
        with pytest.raises(StorageError, match=r"learner-00001-of-00002\.safetensors is missing"):
            store.open(4)
        with pytest.raises(StorageError, match=r"learner-00002-of-00004\.safetensors is damaged"):
            store.open(1)
        assert store.latest() == 3
    assert "learner-00001-of-00002.safetensors is missing" in caplog.text


def test_each_rank_reads_its_own_share_and_names_what_is_wrong_with_it(copied: Path, tmp_path: Path) -> None:
    damaged = copied / "step-00000004" / "learner-00001-of-00002.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    run_ranks("verifying_ranks", 2, str(copied), str(tmp_path))
    first, second = (json.loads((tmp_path / f"read-{rank}").read_text()) for rank in (0, 1))
    assert first == [
        "4/learner-00000-of-00002.safetensors", "4/learner.safetensors", "3/learner.safetensors",
    ]  # fmt: skip
    assert second == ["4/learner-00001-of-00002.safetensors", "3/state.json"], "nothing after what is wrong"
    assert "step-00000004: rank 1: learner-00001-of-00002.safetensors is damaged" in (tmp_path / "said").read_text()


def test_a_share_missing_in_the_manifest_is_named_by_its_tensor(copied: Path) -> None:
    folder = copied / "step-00000001"
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["learner-00002-of-00004.safetensors"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with (
        CheckpointStore(copied, keep=9) as store,
        pytest.raises(StorageError, match=r"the share of learner\.\S+ that begins at"),
    ):
        store.open(1)

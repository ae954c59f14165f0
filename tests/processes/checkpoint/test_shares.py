"""Checkpoints of several ranks resume on any number of ranks, to the bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import critic, policy, rollouts, spec
from rank_sets import run_ranks

from rlhfspec.errors import StorageError
from rlhfspec.training.checkpoint import CheckpointStore
from rlhfspec.training.learning.learner import Learner

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


def flat(state: Any, at: str = "") -> dict[str, Any]:
    if not isinstance(state, dict):
        return {at: state}
    return {name: value for key, inner in state.items() for name, value in flat(inner, f"{at}/{key}").items()}


def assert_same(one: Any, other: Any) -> None:
    ours, theirs = flat(one), flat(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == theirs[name].dtype, name
            assert torch.equal(value, theirs[name]), name
        else:
            assert value == theirs[name], name


def test_shares_are_what_would_have_been_gathered(found: Path) -> None:
    state = loaded(found, 1)
    assert state["policy_optimizer"]["state"].keys() == {str(n) for n in range(len(state["policy"]))}
    assert_same(state, torch.load(found / "whole.pt", weights_only=True))


@pytest.mark.parametrize("step", [2, 3, 4])
def test_any_number_of_ranks_goes_on_with_the_same_bits(found: Path, step: int) -> None:
    assert_same(loaded(found, step), loaded(found, 1))


def test_each_rank_has_a_file_and_one_rank_the_one_it_always_had(found: Path) -> None:
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


def test_what_follows_is_what_one_rank_does(found: Path) -> None:
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
    import shutil

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
    said = (tmp_path / "said").read_text()
    assert "step-00000004: rank 1: learner-00001-of-00002.safetensors is damaged" in said


def test_a_share_that_the_manifest_does_not_know_of_is_missed_by_its_tensor(copied: Path) -> None:
    folder = copied / "step-00000001"
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["learner-00002-of-00004.safetensors"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with CheckpointStore(copied, keep=9) as store, pytest.raises(StorageError, match=r"the share of learner\.\S+ from"):
        store.open(1)

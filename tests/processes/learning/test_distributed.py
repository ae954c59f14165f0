"""Ranks train what one process trains, sharded or tensor-parallel, and none waits for ever."""

import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import critic, policy, rollouts, same_states, same_weights, spec, stored_spec
from on_device import why_no_second
from rank_sets import run_ranks
from tensor_ranks import KINDS, NUM_STEPS, learner_of

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.common.ranks.meeting import joined
from rlhfspec.sweep.classes import tiny_config, tiny_model
from rlhfspec.tiny import random_model
from rlhfspec.training.checkpoint import CheckpointStore
from rlhfspec.training.leading import Leader
from rlhfspec.training.learning.learner import Learner
from rlhfspec.training.modeling.digest import digest
from rlhfspec.training.modeling.loading import prepared


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    random_model("llama", seed=1).bfloat16().save_pretrained(folder / "stored")
    run_ranks("two_ranks", 2, str(folder))
    return folder


@pytest.fixture(scope="module")
def on_devices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := why_no_second():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("devices")
    run_ranks("two_devices", 2, str(folder), popen=subprocess.Popen)
    return folder


def mixed_policy() -> Any:
    return prepared(tiny_model(tiny_config("flint")), dtype="bfloat16", max_context=64)


def alone() -> tuple[list[Any], Learner]:
    learner = Learner(spec("ppo", tokensPerMicroBatch=40, epochs=2), policy(), critic(), num_threads=1)
    return [learner.learn(step) for step in [rollouts(0), rollouts(1), rollouts(2, num_samples=1)]], learner


def test_two_ranks_train_what_one_trains(found: Path) -> None:
    theirs = torch.load(found / "found-off.pt", weights_only=True)
    reports, learner = alone()
    for place, report in enumerate(reports):
        assert torch.allclose(theirs["log_probs"][place], report.log_probs, atol=1e-4)
        assert theirs["metrics"][place].keys() == report.metrics.keys()
        for name, value in report.metrics.items():
            assert math.isclose(theirs["metrics"][place][name], value, rel_tol=1e-4, abs_tol=1e-4), (place, name)
    same_weights(theirs["policy"], learner.policy_state(), 1e-6)
    same_weights(theirs["critic"], learner.critic_state(), 1e-6)


def test_a_rank_for_the_policy_and_one_for_the_critic_train_the_bits_of_one(found: Path) -> None:
    theirs = torch.load(found / "found-auto.pt", weights_only=True)
    reports, learner = alone()
    for place, report in enumerate(reports):
        assert torch.equal(theirs["log_probs"][place], report.log_probs)
        assert theirs["metrics"][place] == report.metrics
    for name, state in (("policy", learner.policy_state()), ("critic", learner.critic_state())):
        assert digest(theirs[name]) == digest(state), name


def test_two_ranks_train_a_model_of_two_types(found: Path) -> None:
    theirs = torch.load(found / "mixed-off.pt", weights_only=True)
    learner = Learner(spec(), mixed := mixed_policy(), num_threads=1)
    before = {name: tensor.clone() for name, tensor in mixed.state_dict().items()}
    assert {tensor.dtype for tensor in before.values()} == {torch.float32, torch.bfloat16}
    ours = learner.learn(rollouts(0)).log_probs
    torch.testing.assert_close(theirs["log_probs"], ours, atol=0.2, rtol=0)  # other rows at a time, other roundings
    assert float((theirs["log_probs"] - ours).abs().median()) < 0.03
    for name, tensor in learner.policy_state().items():
        assert theirs["policy"][name].dtype == tensor.dtype == before[name].dtype
        if tensor.dtype == torch.float32:  # in bfloat16 a small step may be none
            assert not torch.equal(theirs["policy"][name], before[name]), name


def test_two_ranks_that_compute_layers_again_train_the_same_bits(found: Path) -> None:
    kept, again = (torch.load(found / f"mixed-{name}.pt", weights_only=True) for name in ("off", "on"))
    assert torch.equal(kept["log_probs"], again["log_probs"])
    assert digest(kept["policy"]) == digest(again["policy"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_first_rank_proves_the_model_and_all_ranks_train_alike(found: Path, dtype: str) -> None:
    """Ranks read their shares of a bfloat16 file and convert them to their own type."""
    theirs = [torch.load(found / f"stored-{dtype}-{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert [each["asked"] for each in theirs] == [2, 0], "policy and critic"
    assert theirs[0]["types"] == theirs[1]["types"] == [f"torch.{dtype}"]
    assert theirs[0]["report"] == theirs[1]["report"]
    learner = Learner.from_spec(stored_spec(found, dtype), num_threads=1)
    assert digest(theirs[0]["policy"]) == digest(learner.policy_state())
    assert digest(theirs[0]["critic"]) == digest(learner.critic_state())
    difference = (theirs[0]["log_probs"] - learner.learn(rollouts(0)).log_probs).abs().max()
    assert difference < (1e-4 if dtype == "float32" else 0.2)  # other rows at a time, other roundings


def test_no_rank_waits_for_a_model_that_the_first_one_refuses(found: Path) -> None:
    """Each rank raises an error; which one is reported first is not fixed."""
    for rank in (0, 1):
        assert "logits differ from Hugging Face's" in (found / f"refused-{rank}").read_text()


@pytest.mark.whole("sets of ranks, each a process that imports torch")
def test_ranks_on_their_own_devices_train_what_one_rank_trains(on_devices: Path) -> None:
    """`two_devices.py` checks that no host tensor goes through the devices' group."""
    theirs = torch.load(on_devices / "devices.pt", weights_only=True)
    for rank in (0, 1):
        assert (on_devices / f"devices-{rank}").read_text() == f"second:{rank}"
    learner = Learner(spec("ppo", tokensPerMicroBatch=40, epochs=2), policy(), critic(), num_threads=1)
    ours = learner.learn(rollouts(0))
    assert torch.allclose(theirs["log_probs"], ours.log_probs, atol=1e-4)
    for name, value in ours.metrics.items():
        assert math.isclose(theirs["metrics"][name], value, rel_tol=1e-3, abs_tol=1e-4), name
    same_weights(theirs["policy"], learner.policy_state(), 2e-5)


@pytest.mark.whole("sets of ranks, each a process that imports torch")
def test_weights_are_never_whole_on_a_device_and_gathered_on_one_host_only(on_devices: Path) -> None:
    theirs = torch.load(on_devices / "devices.pt", weights_only=True)
    assert theirs["where"] == ["cpu"]
    assert theirs["peak"] < 0.75  # a half, and a block
    assert (on_devices / "left").read_text() == "0"


def test_both_ranks_refuse_what_is_not_finite(found: Path) -> None:
    for rank in (0, 1):
        assert "not finite; nothing was trained on it" in (found / f"overflow-{rank}").read_text()


def test_a_follower_names_the_command_that_it_waited_for(found: Path) -> None:
    assert "trainer 1: waited for a command of rank 0" in (found / "silence").read_text()


def test_a_leader_without_other_ranks_is_a_plain_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined(timeout_seconds=1.0, silence_seconds=1.0) as ranks:
        assert ranks == Ranks()
        leader = Leader(Learner(spec(), policy(), num_threads=1), ranks)
        assert leader.learn(rollouts()).version == leader.version == 1
        leader.close()


@pytest.mark.whole("sets of ranks, each a process that imports torch")
def test_blocks_are_gathered_in_bfloat16_and_kept_in_float32(on_devices: Path) -> None:
    theirs = torch.load(on_devices / "devices.pt", weights_only=True)["in bfloat16"]
    assert theirs["ran in"] == ["torch.bfloat16"]
    assert theirs["kept in"] == ["torch.float32"]
    learner = Learner(spec(), policy(), num_threads=1)
    difference = float((theirs["log_probs"] - learner.learn(rollouts(0)).log_probs).abs().max())
    assert 1e-4 < difference < 0.2, difference
    for name, tensor in learner.policy_state().items():
        assert theirs["policy"][name].dtype == torch.float32
        assert (theirs["policy"][name] - tensor).abs().max() < 2.1e-3, name  # Adam's first step is 1e-3 either way


SETS = ((4, 2), (2, 2), (2, 2), (2, 1), (1, 1), (4, 2))  # ranks, and how many of them cut a layer

BIASES_OF_KEYS = ("k_proj.bias", "query_key_value.bias")  # gradients are nothing but rounding, and AdamW scales them up


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("tensor_ranks", 4, str(folder), "trained", "2")
    return folder


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resumed")
    for step, (num_ranks, parts) in enumerate(SETS, start=1):
        run_ranks("tensor_ranks", num_ranks, str(folder), "resumed", str(parts), str(step))
    return folder


@pytest.mark.whole("sets of ranks, each a process that imports torch")
@pytest.mark.parametrize("kind", KINDS)
def test_two_by_two_ranks_train_what_one_process_trains(trained: Path, kind: str) -> None:
    theirs = torch.load(trained / f"{kind}.pt", weights_only=True)
    learner = learner_of(kind)
    for step in range(NUM_STEPS):
        report = learner.learn(rollouts(step))
        torch.testing.assert_close(theirs["log_probs"][step], report.log_probs, atol=1e-4, rtol=1e-4)
        assert theirs["metrics"][step] == pytest.approx(report.metrics, rel=1e-3, abs=1e-4)
    own = learner.policy_state()
    assert theirs["policy"].keys() == own.keys()
    for name, tensor in own.items():
        if not name.endswith(BIASES_OF_KEYS):
            assert (theirs["policy"][name] - tensor).abs().max() < 1e-4, name
    if "critic" in theirs:
        same_weights(theirs["critic"], learner.critic_state(), 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_of_a_layer_keep_the_same_bits_on_all_ranks(trained: Path, kind: str) -> None:
    first, second, third, fourth = torch.load(trained / f"{kind}.pt", weights_only=True)["replicas"]
    assert (first, third) == (second, fourth)


def test_a_rank_has_a_quarter_of_the_parameters(trained: Path) -> None:
    shares = torch.load(trained / "llama.pt", weights_only=True)["shares"]
    assert sum(shares) == pytest.approx(1.0, abs=0.01)  # norms are on both ranks of a layer
    assert max(shares) < 0.26


@pytest.mark.whole("six sets of ranks, each a process that imports torch")
@pytest.mark.parametrize("step", range(2, len(SETS) + 1))
def test_a_checkpoint_loads_the_same_bits_on_any_set_of_ranks(resumed: Path, step: int) -> None:
    with CheckpointStore(resumed / "checkpoints", keep=9) as store:
        same_states(store.load(1)["learner"], store.load(step)["learner"])


@pytest.mark.whole("six sets of ranks, each a process that imports torch")
def test_the_next_step_has_the_same_bits_on_the_same_set_of_ranks(resumed: Path) -> None:
    steps = [torch.load(resumed / f"next-{step}.pt", weights_only=True) for step in range(1, len(SETS) + 1)]
    for model in ("policy", "critic"):
        for name, tensor in steps[0][model].items():
            for step in steps[1:]:
                assert (step[model][name] - tensor).abs().max() < 1e-4, name
            assert torch.equal(steps[5][model][name], tensor), name  # two by two again
            assert torch.equal(steps[1][model][name], steps[2][model][name]), name


@pytest.mark.whole("six sets of ranks, each a process that imports torch")
def test_files_of_ranks_hold_only_their_own_parts(resumed: Path) -> None:
    def sizes(step: int) -> dict[str, int]:
        folder = resumed / "checkpoints" / f"step-{step:08d}"
        return {path.stem: path.stat().st_size for path in folder.glob("*.safetensors")}

    whole = sizes(5)["learner"]
    parts = sizes(1)
    assert parts.keys() == {"learner", *(f"learner-0000{rank}-of-00004" for rank in range(4))}
    assert max(size for name, size in parts.items() if name != "learner") < 0.3 * whole
    assert sizes(2).keys() == {"learner", "learner-00000-of-00002", "learner-00001-of-00002"}

"""Tensor-parallel ranks with sharding train what one process trains."""

from pathlib import Path

import pytest
import torch
from learners import rollouts
from rank_sets import run_ranks
from tensor_ranks import KINDS, NUM_STEPS, learner_of

from rlhfspec.training.checkpoint import CheckpointStore

SETS = ((4, 2), (2, 2), (2, 2), (2, 1), (1, 1), (4, 2))  # ranks, and how many of them cut a layer

BIASES_OF_KEYS = ("k_proj.bias", "query_key_value.bias")  # gradients are nothing but rounding, and AdamW scales them up


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("tensor_ranks", 4, str(folder), "trained", "2")
    return folder


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resumed")
    for step, (num_ranks, parts) in enumerate(SETS, start=1):
        run_ranks("tensor_ranks", num_ranks, str(folder), "resumed", str(parts), str(step))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_by_two_ranks_train_what_one_process_trains(found: Path, kind: str) -> None:
    theirs = torch.load(found / f"{kind}.pt", weights_only=True)
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
        for name, tensor in learner.critic_state().items():
            assert (theirs["critic"][name] - tensor).abs().max() < 1e-4, name


@pytest.mark.parametrize("kind", KINDS)
def test_what_ranks_of_a_layer_have_alike_stays_the_same_bits(found: Path, kind: str) -> None:
    first, second, third, fourth = torch.load(found / f"{kind}.pt", weights_only=True)["replicas"]
    assert (first, third) == (second, fourth)


def test_a_rank_has_a_quarter_of_the_parameters(found: Path) -> None:
    shares = torch.load(found / "llama.pt", weights_only=True)["shares"]
    assert sum(shares) == pytest.approx(1.0, abs=0.01)  # norms are on both ranks of a layer
    assert max(shares) < 0.26


@pytest.mark.whole("six sets of ranks, each a process that imports torch")
@pytest.mark.parametrize("step", range(2, len(SETS) + 1))
def test_any_other_set_goes_on_with_the_same_bits(resumed: Path, step: int) -> None:
    def flat(state: object, at: str = "") -> dict[str, object]:
        if not isinstance(state, dict):
            return {at: state}
        return {name: value for key, inner in state.items() for name, value in flat(inner, f"{at}/{key}").items()}

    with CheckpointStore(resumed / "checkpoints", keep=9) as store:
        first, later = (flat(store.load(each)["learner"]) for each in (1, step))
    assert first.keys() == later.keys()
    for name, value in first.items():
        assert torch.equal(later[name], value) if isinstance(value, torch.Tensor) else later[name] == value, name


@pytest.mark.whole("six sets of ranks, each a process that imports torch")
def test_what_follows_is_the_same_bits_on_the_same_set_and_close_on_another(resumed: Path) -> None:
    steps = [torch.load(resumed / f"next-{step}.pt", weights_only=True) for step in range(1, len(SETS) + 1)]
    for model in ("policy", "critic"):
        for name, tensor in steps[0][model].items():
            for step in steps[1:]:
                assert (step[model][name] - tensor).abs().max() < 1e-4, name
            assert torch.equal(steps[5][model][name], tensor), name  # two by two again
            assert torch.equal(steps[1][model][name], steps[2][model][name]), name


@pytest.mark.whole("six sets of ranks, each a process that imports torch")
def test_files_of_ranks_hold_their_parts_and_no_more(resumed: Path) -> None:
    def sizes(step: int) -> dict[str, int]:
        folder = resumed / "checkpoints" / f"step-{step:08d}"
        return {path.stem: path.stat().st_size for path in folder.glob("*.safetensors")}

    whole = sizes(5)["learner"]
    parts = sizes(1)
    assert parts.keys() == {"learner", *(f"learner-0000{rank}-of-00004" for rank in range(4))}
    assert max(size for name, size in parts.items() if name != "learner") < 0.3 * whole
    assert sizes(2).keys() == {"learner", "learner-00000-of-00002", "learner-00001-of-00002"}

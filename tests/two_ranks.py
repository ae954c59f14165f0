"""Script of test_distributed.py, once a rank: trains the same as one process. argv: a folder for results."""

import sys
from pathlib import Path

import pytest
import torch
from learners import critic, policy, rollouts, spec, stored_spec

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.common.ranks.meeting import joined
from rlhfspec.errors import InvalidRequest, NumericalError, StageStalled
from rlhfspec.huggingface.proof import reference
from rlhfspec.huggingface.proof.check import report_of
from rlhfspec.huggingface.proof.reference import ask
from rlhfspec.sweep.classes import tiny_config, tiny_model
from rlhfspec.training.checkpoint import CheckpointStore
from rlhfspec.training.checkpoint.shares import LEARNER
from rlhfspec.training.leading import Leader, follow
from rlhfspec.training.learning.learner import Learner
from rlhfspec.training.modeling import loading
from rlhfspec.training.modeling.digest import digest
from rlhfspec.training.modeling.loading import prepared


def new_learner(name: str, ranks: Ranks, *, fuse: str = "auto") -> Learner:
    settings = spec(name, tokensPerMicroBatch=40, epochs=2, fuse=fuse)
    return Learner(settings, policy(), critic() if name == "ppo" else None, ranks=ranks, num_threads=1)


def lead(leader: Leader, folder: Path, fuse: str) -> None:
    """Train two steps, the second again from the state after the first, and one with fewer samples than ranks."""
    reports = [leader.learn(rollouts(0))]
    with CheckpointStore(folder / f"checkpoints-{fuse}", keep=1) as store:
        store.save(1, {LEARNER: leader.state()})
        leader.load_state(store.open(1)[LEARNER])
        state = {name: value.clone() for name, value in leader.policy_state().items()}
        reports.append(leader.learn(rollouts(1)))
        first = digest(leader.policy_state())
        leader.load_state(store.open(1)[LEARNER])
    assert digest(leader.policy_state()) == digest(state)
    leader.learn(rollouts(1))
    assert digest(leader.policy_state()) == first, "a resumed step differs"
    reports.append(leader.learn(rollouts(2, num_samples=1)))
    found = {"metrics": [report.metrics for report in reports]}
    found |= {"log_probs": [report.log_probs for report in reports], "policy": leader.policy_state()}
    found |= {"critic": leader.critic_state()}
    torch.save(found, folder / f"found-{fuse}.pt")
    leader.close()


def mixed(ranks: Ranks, folder: Path, recompute: str) -> None:
    policy = prepared(tiny_model(tiny_config("flint")), dtype="bfloat16", max_context=64)
    learner = Learner(spec(activationCheckpointing=recompute), policy, ranks=ranks, num_threads=1)
    log_probs, state = learner.learn(rollouts(0)).log_probs, learner.policy_state()
    if ranks.rank == 0:
        torch.save({"log_probs": log_probs, "policy": state}, folder / f"mixed-{recompute}.pt")


def stored(ranks: Ranks, folder: Path, dtype: str) -> None:
    """Train a model and critic stored in bfloat16, and record which rank proves it."""
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "ask", lambda *given, **options: asked.append(1) or ask(*given, **options))
        learner = Learner.from_spec(stored_spec(folder, dtype), ranks=ranks, num_threads=1)
    weights = {"policy": learner.policy_state(), "critic": learner.critic_state()}
    begun = {model: {name: each.clone() for name, each in state.items()} for model, state in weights.items()}
    types = {str(parameter.dtype) for parameter in learner.policy.parameters()}
    log_probs = learner.learn(rollouts(0)).log_probs
    found = {"asked": len(asked), "types": sorted(types), "report": repr(report_of(learner.policy))}
    torch.save(found | begun | {"log_probs": log_probs}, folder / f"stored-{dtype}-{ranks.rank}.pt")


def refused(ranks: Ranks, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 0:
            patch.setattr(loading, "TOLERANCES", dict.fromkeys(loading.TOLERANCES, -1.0))
            patch.setattr(reference, "_FACTOR", 0)
        with pytest.raises(InvalidRequest) as error:
            Learner.from_spec(stored_spec(folder, "float32"), ranks=ranks, num_threads=1)
    (folder / f"refused-{ranks.rank}").write_text(str(error.value))


def overflow(learner: Learner, ranks: Ranks, folder: Path) -> None:
    step = rollouts(0)
    step.rewards[6] = 1e300
    try:
        learner.learn(step)
    except NumericalError as error:
        (folder / f"overflow-{ranks.rank}").write_text(str(error))


def silence(learner: Learner, ranks: Ranks, folder: Path) -> None:
    if ranks.rank > 0:
        try:
            follow(learner, ranks)
        except StageStalled as error:
            (folder / "silence").write_text(str(error))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with joined(timeout_seconds=60.0, silence_seconds=60.0) as ranks:
        assert ranks.num_ranks == 2
        for fuse in ("off", "auto"):  # shares of both models on each; a model on each
            learner = new_learner("ppo", ranks, fuse=fuse)
            if ranks.rank == 0:
                lead(Leader(learner, ranks), folder, fuse)
            else:
                follow(learner, ranks)
        for recompute in ("off", "on"):
            mixed(ranks, folder, recompute)
        for dtype in ("float32", "bfloat16"):
            stored(ranks, folder, dtype)
        refused(ranks, folder)
        overflow(new_learner("dr-grpo", ranks), ranks, folder)
        silence(learner, ranks, folder)

"""Run by test_distributed.py, once a rank: trains what that trains alone. argv: a folder for what is found."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from learners import critic, policy, rollouts, spec

from rlhfspec.errors import NumericalError, StageStalled
from rlhfspec.sweep.classes import tiny_config, tiny_model
from rlhfspec.training.checkpoint import CheckpointStore
from rlhfspec.training.checkpoint.shares import LEARNER, write_learner
from rlhfspec.training.learning.distributed import Leader, Ranks, follow, joined
from rlhfspec.training.learning.learner import Learner
from rlhfspec.training.modeling.digest import digest
from rlhfspec.training.modeling.loading import prepared


def new_learner(name: str, ranks: Ranks, *, fuse: str = "auto") -> Learner:
    settings = spec(name, tokensPerMicroBatch=40, epochs=2, fuse=fuse)
    return Learner(settings, policy(), critic() if name == "ppo" else None, ranks=ranks, num_threads=1)


def lead(leader: Leader, folder: Path, fuse: str) -> None:
    """Two steps, the second once more from the state after the first, and one with fewer samples than ranks."""
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
    found = {
        "metrics": [report.metrics for report in reports],
        "log_probs": [report.log_probs for report in reports],
        "policy": leader.policy_state(),
        "critic": leader.critic_state(),
    }
    torch.save(found, folder / f"found-{fuse}.pt")
    leader.close()


def mixed(ranks: Ranks, folder: Path, recompute: str) -> None:
    """Routers and sinks in float32 in a model in bfloat16."""
    policy = prepared(tiny_model(tiny_config("flint")), dtype="bfloat16", max_context=64)
    learner = Learner(spec(activationCheckpointing=recompute), policy, ranks=ranks, num_threads=1)
    log_probs, state = learner.learn(rollouts(0)).log_probs, learner.policy_state()
    if ranks.rank == 0:
        torch.save({"log_probs": log_probs, "policy": state}, folder / f"mixed-{recompute}.pt")


def overflow(learner: Learner, ranks: Ranks, folder: Path) -> None:
    step = rollouts(0)
    step.rewards[6] = 1e300
    try:
        learner.learn(step)
    except NumericalError as error:
        (folder / f"overflow-{ranks.rank}").write_text(str(error))


def silence(learner: Learner, ranks: Ranks, folder: Path) -> None:
    """Rank 0 leaves without a word."""
    if ranks.rank > 0:
        try:
            follow(learner, ranks, write_learner)
        except StageStalled as error:
            (folder / "silence").write_text(str(error))


def main() -> None:
    folder = Path(sys.argv[1])
    with joined(timeout_seconds=60.0, silence_seconds=60.0) as ranks:
        assert ranks.num_ranks == 2
        for fuse in ("off", "auto"):  # shares of both models on each; a model on each
            learner = new_learner("ppo", ranks, fuse=fuse)
            if ranks.rank == 0:
                lead(Leader(learner, ranks, write_learner), folder, fuse)
            else:
                follow(learner, ranks, write_learner)
        for recompute in ("off", "on"):
            mixed(ranks, folder, recompute)
        overflow(new_learner("dr-grpo", ranks), ranks, folder)
        silence(learner, ranks, folder)


if __name__ == "__main__":
    main()

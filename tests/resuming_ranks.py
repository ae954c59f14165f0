"""Script of test_checkpoint_killed.py, once a rank. argv: folder, step and fuse of a checkpoint to resume."""

import sys
from pathlib import Path
from typing import Any

import torch
from learners import critic, policy, rollouts, spec

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.common.ranks.meeting import joined
from rlhfspec.training.checkpoint import CheckpointStore
from rlhfspec.training.checkpoint.shares import LEARNER
from rlhfspec.training.leading import Leader, follow
from rlhfspec.training.learning.learner import Learner
from rlhfspec.training.learning.network import _whole


def make(ranks: Ranks, fuse: str) -> Learner:
    return Learner(spec("ppo", tokensPerMicroBatch=40, fuse=fuse), policy(), critic(), ranks=ranks, num_threads=1)


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    """Return every tensor whole: the slow twin. It is collective."""
    return _whole({name: gathered(value) if isinstance(value, dict) else value for name, value in state.items()})


def lead(leader: Leader, folder: Path, step: int) -> None:
    write_step(leader, folder, step)
    if step > 1:
        report = leader.learn(rollouts(1))
        torch.save({"metrics": report.metrics, "policy": leader.policy_state()}, folder / f"next-{step}.pt")
    leader.close()


def write_step(leader: Leader, folder: Path, step: int) -> None:
    with CheckpointStore(folder / "checkpoints", keep=9) as store:
        if step == 1:
            leader.learn(rollouts(0))
        else:
            leader.load_state(store.open(step - 1)[LEARNER])
        store.save(step, {LEARNER: leader.state()})


if __name__ == "__main__":
    folder, step, fuse = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    with joined(timeout_seconds=60.0, silence_seconds=60.0) as ranks:
        learner = make(ranks, fuse)
        if ranks.rank > 0:
            follow(learner, ranks)
        else:
            lead(Leader(learner, ranks), folder, step)
        if step == 1:
            whole = gathered(learner.state())
            if ranks.rank == 0:
                torch.save(whole, folder / "whole.pt")

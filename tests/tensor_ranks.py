"""Script of test_distributed.py, once a rank. argv: a folder, the task, ranks per layer, further arguments."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from learners import critic, rollouts, spec
from resuming_ranks import write_step
from torch.distributed.tensor import DTensor

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.common.ranks.meeting import joined
from rlhfspec.tiny import random_model
from rlhfspec.training.leading import Leader, follow
from rlhfspec.training.learning.learner import Learner
from rlhfspec.training.modeling.digest import digest
from rlhfspec.training.modeling.loading import prepared

KINDS = ("llama", "qwen3", "phi", "gpt-neox")  # plain; norms of heads; biases; products of queries, keys, values in one
NUM_STEPS = 3


def learner_of(kind: str, ranks: Ranks | None = None) -> Learner:
    with_critic = kind == KINDS[0]
    again = {"activationCheckpointing": "on"} if kind == KINDS[1] else {}
    settings = spec("ppo" if with_critic else "grpo", tokensPerMicroBatch=40, **again)
    policy = prepared(random_model(kind, seed=1))
    return Learner(settings, policy, critic() if with_critic else None, ranks=ranks, num_threads=1)


def own_share(learner: Learner) -> float:
    whole = sum(parameter.numel() for parameter in random_model("llama", seed=1).parameters())
    own = [p.to_local() if isinstance(p, DTensor) else p for p in learner.policy.parameters()]
    return sum(part.numel() for part in own) / whole


def trained(ranks: Ranks, folder: Path) -> None:
    for kind in KINDS:
        learner = learner_of(kind, ranks)
        if kind == KINDS[0]:
            shares = ranks.gather(own_share(learner))
        reports = [learner.learn(rollouts(step)) for step in range(NUM_STEPS)]
        found: dict[str, Any] = {
            "metrics": [report.metrics for report in reports], "log_probs": [report.log_probs for report in reports],
            "policy": learner.policy_state(), "replicas": ranks.gather(replicas(learner)),
        }  # fmt: skip
        if kind == KINDS[0]:
            found |= {"critic": learner.critic_state(), "shares": shares}
        if ranks.rank == 0:
            torch.save(found, folder / f"{kind}.pt")


def replicas(learner: Learner) -> str:
    weights = learner._networks["policy"].own_weights()
    return digest({
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for name, tensor in weights.items() if isinstance(tensor, torch.Tensor)
    })  # fmt: skip


def resumed(ranks: Ranks, folder: Path) -> None:
    step = int(sys.argv[4])
    learner = learner_of(KINDS[0], ranks)
    if ranks.rank > 0:
        follow(learner, ranks)
        return
    leader = Leader(learner, ranks)
    write_step(leader, folder, step)
    leader.learn(rollouts(1))
    torch.save({"policy": leader.policy_state(), "critic": leader.critic_state()}, folder / f"next-{step}.pt")
    leader.close()


TASKS: dict[str, Callable[[Ranks, Path], None]] = {"trained": trained, "resumed": resumed}


if __name__ == "__main__":
    folder, task, parts = Path(sys.argv[1]), TASKS[sys.argv[2]], int(sys.argv[3])
    with joined(timeout_seconds=60.0, silence_seconds=60.0, tensor_parallel=parts) as ranks:
        task(ranks, folder)

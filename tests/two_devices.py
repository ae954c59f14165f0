"""Script of test_distributed.py, once a rank, each on its own device. argv: a folder for results."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import second_device
import torch
import torch.distributed as dist
from learners import critic, policy, rollouts, spec
from second_device import group
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.common.ranks.meeting import joined
from rlhfspec.training.checkpoint import CheckpointStore
from rlhfspec.training.checkpoint.shares import LEARNER
from rlhfspec.training.leading import Leader, follow
from rlhfspec.training.learning.learner import Learner
from rlhfspec.training.modeling.loading import prepared


def only_the_device(rank: int) -> None:
    """Make the default group refuse host tensors and objects, as NCCL does."""
    refused = group.SecondGroup

    def checked(name: str) -> None:
        whole = getattr(refused, name)

        def call(self: object, tensors: list[torch.Tensor], *rest: object) -> object:
            assert {tensor.device for tensor in tensors} == {torch.device("second", rank)}, f"{name} of {tensors}"
            return whole(self, tensors, *rest)

        setattr(refused, name, call)

    checked("allreduce")
    checked("broadcast")


def num_bytes(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def devices_of(learner: Learner) -> set[str]:
    networks = learner._networks.values()
    tensors = [each for network in networks for each in (*network.module.parameters(), *network.module.buffers())]
    return {str(tensor.device) for tensor in tensors}


def share(ranks: Ranks, device: str) -> float:
    """Return the peak share of the weights on a device while a large model is made."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=16, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    weights = num_bytes(model := prepared(LlamaForCausalLM(config), max_context=64))
    with second_device.counted() as made:
        Learner(spec(activationCheckpointing="off"), model, ranks=ranks, num_threads=1, device=device)
    return float(made.peak) / weights


def gathered_in_bfloat16(ranks: Ranks, device: str) -> dict[str, object]:
    """Return the types of block inputs and kept tensors in a step with default precision."""
    learner = Learner(spec(autocast="auto"), model := policy(), ranks=ranks, num_threads=1, device=device)
    seen = set()
    for block in model.model.layers:
        block.self_attn.register_forward_pre_hook(lambda module, *_: seen.add(str(module.q_proj.weight.dtype)))
    log_probs = learner.learn(rollouts(0)).log_probs
    kept = {str(parameter.dtype) for parameter in model.parameters()}
    return {"ran in": sorted(seen), "kept in": sorted(kept), "log_probs": log_probs, "policy": learner.policy_state()}


def run(ranks: Ranks, folder: Path, device: str) -> None:
    in_bfloat16 = gathered_in_bfloat16(ranks, device)
    peak = share(ranks, device)
    settings = spec("ppo", tokensPerMicroBatch=40, epochs=2, activationCheckpointing="off")
    learner = Learner(settings, policy(), critic(), ranks=ranks, num_threads=1, device=device)
    (folder / f"devices-{ranks.rank}").write_text(" ".join(devices_of(learner)))
    if ranks.rank > 0:
        follow(learner, ranks)
        (folder / "left").write_text(f"{len(learner.policy_state())}")
    else:
        leader = Leader(learner, ranks)
        report = leader.learn(rollouts(0))
        with CheckpointStore(folder / "checkpoints", keep=1) as store:
            store.save(1, {LEARNER: leader.state()})
            state = store.open(1)[LEARNER]
        policy_state = leader.policy_state()
        before = {name: tensor.clone() for name, tensor in policy_state.items()}
        where = {tensor.device.type for tensor in policy_state.values()}
        leader.learn(rollouts(1))
        after = {name: tensor.clone() for name, tensor in leader.policy_state().items()}
        leader.load_state(state)
        assert all(torch.equal(tensor, before[name]) for name, tensor in leader.policy_state().items())
        found = {"log_probs": report.log_probs, "metrics": report.metrics, "policy": before, "after": after}
        torch.save(found | {"where": sorted(where), "peak": peak, "in bfloat16": in_bfloat16}, folder / "devices.pt")
        leader.close()
        learner.policy_state()
    dist.barrier(group=ranks.host)


@contextmanager
def joined_on_devices() -> Iterator[tuple[Ranks, str]]:
    rank = int(os.environ["LOCAL_RANK"])
    second_device.load()
    group.register()
    only_the_device(rank)
    device = f"second:{rank}"
    with second_device.swapping(), joined(timeout_seconds=60.0, silence_seconds=60.0, device=device) as ranks:
        yield ranks, device


if __name__ == "__main__":
    with joined_on_devices() as (ranks, device):
        run(ranks, Path(sys.argv[1]), device)

"""Training on the device: a step, a checkpoint of ranks, and a whole run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from gpu_parts.measure import Day, llama
from rlhfspec import job
from rlhfspec.training.learning.learner import Learner
from rlhfspec.training.learning.rollouts import Rollouts
from rlhfspec.training.modeling.loading import prepared

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.yaml"


def training(day: Day) -> None:
    """Time steps of GRPO on a model of 1.5B's widths, in packed rows of 4,096 tokens."""
    layers, length = 28, 1024
    context, answers = (4096, 16) if day.is_real else (64, 4)
    length = length if day.is_real else 12
    spec = job.Spec.model_validate(
        {
            "model": {"path": "m", "dtype": str(day.dtype).removeprefix("torch.")}, "dataset": {"path": "d"},
            "algorithm": {"name": "grpo"}, "generation": {"maxTokens": length},
            "rewards": {"sources": [{"type": "function", "function": "a:b"}]},
            "training": {"steps": 4, "tokensPerMicroBatch": context},
        }
    )  # fmt: skip
    model = prepared(llama(day, layers=layers, size="1.5B"), dtype=spec.model.dtype, max_context=context)
    learner = Learner(spec, model, device=str(day.device), num_threads=torch.get_num_threads())
    step = rollouts(model.config.vocab_size, answers, length)
    times = []
    day.forget_peak()
    for _ in range(3):
        began = time.perf_counter()
        report = learner.learn(step)
        day.wait()
        times.append(time.perf_counter() - began)
    parameters = sum(each.numel() for each in model.parameters())
    tokens = answers * length
    rate = 6 * parameters * tokens / min(times) / 1e12  # forward and backward; log-probs of a first forward are on top
    day.tell("training", "a step of 16 answers of 1,024 tokens", min(times), "s")
    day.tell("training", "parameters' products", rate, "TFLOP/s", ">= 400")
    day.tell("training", "peak memory", day.peak_bytes() / 2**30, "GiB")
    day.tell(
        "training", "loss is finite", int(report.metrics["policy_loss"] == report.metrics["policy_loss"]), "", "= 1"
    )


def rollouts(vocab: int, answers: int, length: int) -> Rollouts:
    drawn = torch.Generator().manual_seed(0)
    total = answers * length
    log_probs = -5 * torch.rand(total, generator=drawn)
    return Rollouts(
        ids=tuple(f"day/1/0/{number}" for number in range(answers)),
        group_index=torch.zeros(answers, dtype=torch.int64),
        lengths=torch.full((answers,), length),
        prompt_token_ids=((5, 6, 7),) * answers,
        token_ids=torch.randint(3, vocab, (total,), generator=drawn),
        generator_log_probs=log_probs, log_probs=log_probs,
        weights_versions=torch.zeros(total, dtype=torch.int64),
        rewards=torch.rand(answers, generator=drawn, dtype=torch.float64), reward_components={},
        reference_log_probs=log_probs - 0.1, values=None, truncated=torch.ones(answers, dtype=torch.bool),
    )  # fmt: skip


def ranks(day: Day) -> None:
    """Check that one rank with a process group writes a checkpoint as runs do, and resumes bit for bit."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from rlhfspec import job
    from rlhfspec.training.checkpoint.folders import open_checkpoint, write_checkpoint
    from rlhfspec.training.learning.network import Network

    is_cuda = day.device.type == "cuda"
    settings = job.Training(optimizer=job.Optimizer(learningRate=1e-2))
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        store, kept = f"file://{folder}/store", Path(folder) / "state"
        kept.mkdir()
        backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
        mesh = init_device_mesh(day.device.type if is_cuda else "cpu", (1,))
        digests = []
        for resumed in (False, True):
            torch.manual_seed(int(resumed))
            model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).to(mesh.device_type)
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            network = Network(model, settings.optimizer, settings, field="spec.training.optimizer")
            if resumed:
                state = open_checkpoint(kept)["learner"]
                network.load_weights(state["weights"])
                network.load_optimizer_state(state["optimizer"])
            for number in range(2 if resumed else 0, 4):
                data = torch.full((8, 64), float(number), device=mesh.device_type)
                model(data).square().mean().backward()
                network.update(network.grad_norm())
                if number == 1:
                    state = {"weights": network.own_weights(), "optimizer": network.optimizer_state()}
                    write_checkpoint(kept, 2, {"learner": state})
            digests.append([parameter.full_tensor().cpu() for parameter in model.parameters()])
        dist.destroy_process_group()
    same = all(torch.equal(*pair) for pair in zip(*digests, strict=True))
    day.tell("ranks", "resumed to the bit", int(same), "", "= 1")


def loop(day: Day) -> None:
    """Compare a run of the shipped example on the device with the same run on the CPU."""
    steps = 10 if day.is_real else 1
    if day.device.type not in ("cuda", "cpu"):
        day.tell("loop", "not run: a run of its own has no such device", 0)
        return
    rewards = {}
    for device in (str(day.device), "cpu")[: 2 if day.is_real else 1]:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable, "-m", "rlhfspec.cli.start", "run", str(EXAMPLE), "--out", f"{folder}/run",
                "--set", f"device={device}", "--set", f"training.steps={steps}",
            ]  # fmt: skip
            began = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            day.tell("loop", f"{steps} steps on {device}", time.perf_counter() - began, "s")
            lines = [json.loads(line) for line in Path(folder, "run", "samples.jsonl").read_text().splitlines()]
            rewards[device] = sum(line["reward"] for line in lines) / len(lines)
            day.tell("loop", f"mean reward on {device}", rewards[device])
    if len(rewards) == 2:
        one, other = rewards.values()
        day.tell("loop", "difference of mean rewards", abs(one - other), "", "<= 0.05")

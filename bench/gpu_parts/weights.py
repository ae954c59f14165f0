"""Sending of weights: the cost of a bucket on the device, and the speed of NCCL to another GPU."""

from __future__ import annotations

import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import torch

from gpu_parts.measure import Day
from rlhfspec.training.weights.group.plan import bucket_digest, buckets, described, fill
from rlhfspec.training.weights.group.sender import GroupSender, SendingRanks

HOST = "127.0.0.1"


def weights(day: Day) -> None:
    """Cast a float32 layer into a bfloat16 bucket, hash it there, and send versions to another GPU."""
    rows = 1 << 15 if day.is_real else 1 << 6
    state = {str(layer): torch.randn(rows, 4096, device=day.device) for layer in range(4 if day.is_real else 2)}
    header = described("day", "policy", 1, state, lambda _: torch.bfloat16)
    plan = buckets(header, 0, 1)
    buffer = torch.zeros(max(bucket.num_bytes for bucket in plan), dtype=torch.uint8, device=day.device)
    for what, act, bar in (
        ("cast into a bucket", lambda: fill(plan[0], buffer, state, 0, 1), ">= 300"),
        ("digest of a bucket", lambda: bucket_digest(buffer[: plan[0].num_bytes], "day"), ">= 50"),
    ):
        act()
        day.wait()
        began = time.perf_counter()
        act()
        day.wait()
        day.tell("weights", what, plan[0].num_bytes / (time.perf_counter() - began) / 1e9, "GB/s", bar)
    if day.device.type != "cuda" or torch.cuda.device_count() < 2:
        day.tell("weights", "not run: NCCL goes from one GPU to another, and there is one", 0)
        return
    between_gpus(day, state, header.num_bytes)


def between_gpus(day: Day, state: dict[str, torch.Tensor], num_bytes: int) -> None:
    context = multiprocessing.get_context("spawn")
    sender = GroupSender("day", host=HOST, device=str(day.device))
    server = grpc.server(ThreadPoolExecutor(4))
    port = server.add_insecure_port(f"{HOST}:0")
    sender.add_to(server)
    server.start()
    other = context.Process(target=receive, args=(f"{HOST}:{port}",), daemon=True)
    other.start()
    ranks = SendingRanks(kept_as=lambda _: lambda _: torch.bfloat16)
    while not sender.members:
        time.sleep(0.05)
    for version in range(1, 4):
        began = time.perf_counter()
        sending = sender.begin("policy", version, state, ranks)
        problem = "nobody is in" if sending is None else sending.end("ab" * 32)
        seconds = time.perf_counter() - began
        day.tell("weights", f"version {version} by NCCL: {problem or 'came'}", int(not problem), "", "= 1")
    day.tell("weights", "a version by NCCL, digests and all", num_bytes / seconds / 1e9, "GB/s", ">= 20")
    other.kill()
    began = time.perf_counter()
    sending = sender.begin("policy", 4, state, ranks)
    is_given_up = sending is None or bool(sending.end("ab" * 32))
    day.tell("weights", "a group whose receiver is gone is given up", int(is_given_up), "", "= 1")
    day.tell("weights", "which takes", time.perf_counter() - began, "s", "<= 40")
    sender.close()
    server.stop(None)


def receive(trainer: str) -> None:
    """Run the receiving process on the second GPU."""
    from rlhfspec.training.weights.group.messages import Wish
    from rlhfspec.training.weights.group.receiver import GroupReceiver
    from rlhfspec.training.weights.group.ways import Ways

    torch.cuda.set_device(1)
    wish = Wish(wants=True, dtype="bfloat16", device="cuda:1")
    GroupReceiver(wish, Ways("group"), address=f"{HOST}:1", trainer_address=lambda: trainer)
    threading.Event().wait()

"""Script of test_weight_groups_killed.py: a generator's receiver, or a trainer's sender, in its own process."""

import sys
import time
from typing import Any

from weight_groups import GroupNode, GroupTrainer, record_of, weights

from rlhfspec.training.weights.group import shares

MEGABYTE = 1 << 20
NUM_BYTES = 32 * MEGABYTE
MIDDLE = 12  # buckets, of 32


def state(version: int) -> Any:
    return weights(version, num_bytes=NUM_BYTES)


def receive(trainer: str = "") -> None:
    """Print the address; read the trainer's; for each version number read, print whether it is complete."""
    trainers = [trainer]
    node = GroupNode(lambda: trainers[-1] or None)
    print(node.address, flush=True)
    for line in map(str.strip, sys.stdin):
        if line.isdecimal():
            print("has" if node.has(int(line), state(int(line))) else "has not", flush=True)
        else:
            trainers.append(line)


def send() -> None:
    """Print the address, then a line when half of a version is sent."""
    fill = shares.fill

    def filled(bucket: Any, *arguments: Any) -> Any:
        filled.count += 1  # type: ignore[attr-defined]
        if filled.count == MIDDLE:  # type: ignore[attr-defined]
            print("half of it is sent", flush=True)
            time.sleep(600)
        return fill(bucket, *arguments)

    filled.count = 0  # type: ignore[attr-defined]
    shares.fill = filled
    trainer = GroupTrainer(bucket_bytes=MEGABYTE)
    sender = trainer.sender
    print(trainer.address, flush=True)
    while not sender.members:
        time.sleep(0.01)
    sender.begin("policy", 1, state(1)).end(record_of(1, state(1)).digest)

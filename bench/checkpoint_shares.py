"""Measure the time and extra memory of three ways to write a checkpoint of several ranks.

    python bench/checkpoint_shares.py --ranks 2 --mib 256

Each rank holds that many MiB of FSDP2 shards: parameters and two moments of each. Runs use `shares`; `dcp`
is torch.distributed.checkpoint in safetensors format, and `gathered` sends one tensor at a time to rank 0. Each way
runs in its own processes and prints a line of JSON: median seconds of the slowest rank, and peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rlhfspec.common.ranks import SECRET
from rlhfspec.common.ranks.group import Ranks
from rlhfspec.common.ranks.meeting import joined
from rlhfspec.training.checkpoint.folders import write_checkpoint
from rlhfspec.training.checkpoint.shares import LEARNER, Written, write_part
from rlhfspec.training.learning.network import _whole

MIB = 1 << 20
State = dict[str, torch.Tensor]


def state_of(mib: int) -> State:
    """Return sharded tensors of 4 MiB per rank each, `mib` MiB per rank in all."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = 512 * dist.get_world_size()
    return {
        f"{name}.{number}": distribute_tensor(torch.full((rows, 2048), float(number)), mesh, [Shard(0)])
        for number in range(mib // 12)
        for name in ("weight", "exp_avg", "exp_avg_sq")
    }


def shares(state: State, folder: Path, ranks: Ranks) -> None:
    own = write_part(folder, LEARNER, state, ranks=ranks, leads=ranks.rank == 0)
    written = [
        Written(document=json.loads(document), files=files)
        for document, files in ranks.gather([json.dumps(own.document), own.files])
    ]
    if ranks.rank == 0:
        write_checkpoint(folder, 1, {LEARNER: lambda _: written})


def with_dcp(state: State, folder: Path, ranks: Ranks) -> None:
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def gathered(state: State, folder: Path, ranks: Ranks) -> None:
    whole = _whole(state)
    if ranks.rank == 0:
        write_checkpoint(folder, 1, {LEARNER: whole})


WAYS: dict[str, Callable[[State, Path, Ranks], None]] = {"shares": shares, "dcp": with_dcp, "gathered": gathered}


def resident(which: str) -> int:
    found = re.search(rf"^{which}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def measured(way: str, state: State, place: Path, ranks: Ranks) -> tuple[float, int]:
    """Return the seconds that a checkpoint takes, and the increase of peak memory in bytes."""
    folder = place / way
    if ranks.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
    before, began = resident("VmRSS"), time.perf_counter()
    WAYS[way](state, folder, ranks)
    dist.barrier()
    return time.perf_counter() - began, resident("VmHWM") - before


def rank_main(way: str, place: Path, mib: int, repeats: int) -> None:
    with joined(timeout_seconds=300.0, silence_seconds=300.0) as ranks:
        state = state_of(mib)
        own = sum(tensor.to_local().nbytes for tensor in state.values() if isinstance(tensor, DTensor))
        everywhere = ranks.gather([measured(way, state, place, ranks) for _ in range(repeats)])
        if ranks.rank == 0:
            seconds = max(statistics.median(each[0] for each in of) for of in everywhere)
            above = max(each[1] for of in everywhere for each in of)
            line = {"way": way, "ranks": ranks.num_ranks, "share_mib": own // MIB, "seconds": round(seconds, 2)}
            print(json.dumps(line | {"above_the_share_mib": round(above / MIB, 1)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=256, help="of a rank")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--place", type=Path, help="set by this script for its ranks")
    parser.add_argument("--way", choices=WAYS, help="likewise")
    told = parser.parse_args()
    if told.place is not None:
        return rank_main(told.way, told.place, told.mib, told.repeats)
    os.environ[SECRET] = secrets.token_hex(32)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(told.ranks)]
    for way in WAYS:
        with tempfile.TemporaryDirectory() as place:
            arguments = ["--mib", str(told.mib), "--repeats", str(told.repeats), "--way", way, "--place", place]
            subprocess.run([*command, __file__, *arguments], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()

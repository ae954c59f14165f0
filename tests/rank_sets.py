"""A set of ranks with torchrun's environment."""

import os
import subprocess
import sys
from typing import Any

import warmed
from places import TESTS
from shared_servers import free_port

from rlhfspec.common.ranks import SECRET


def run_ranks(module: str, num_ranks: int, *arguments: str, popen: Any = warmed.Popen) -> None:
    port = free_port()
    ranks = [
        popen(
            [sys.executable, "-m", module, *arguments], stderr=subprocess.PIPE, text=True, cwd=TESTS,
            env=os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1",
                "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                SECRET: "of these ranks",
            },
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=150)
            assert rank.returncode == 0, said[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()

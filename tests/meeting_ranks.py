"""Script of test_rank_sets.py, once a rank. argv: a folder for results, and the rank to kill."""

import json
import os
import signal
import sys
from pathlib import Path

from rlhfspec.common.ranks.meeting import joined

TOLD = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


if __name__ == "__main__":
    folder, struck = Path(sys.argv[1]), int(sys.argv[2])
    with joined(timeout_seconds=60.0, silence_seconds=60.0) as ranks:
        told = ranks.gather([int(os.environ[name]) for name in TOLD])
        if ranks.rank == struck:
            os.kill(os.getpid(), signal.SIGKILL)
        if struck >= 0:
            ranks.gather("never comes")
        if ranks.rank == 0:
            (folder / "told").write_text(json.dumps(told))

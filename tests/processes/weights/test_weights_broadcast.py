"""Weights between ranks of one group: real processes over gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from places import TESTS


def test_all_ranks_get_what_rank_0_puts(tmp_path: Path) -> None:
    num_ranks = 3
    script = TESTS / "broadcast_ranks.py"
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), str(num_ranks), tmp_path], stderr=subprocess.PIPE)
        for rank in range(num_ranks)
    ]
    said = [process.communicate(timeout=120)[1].decode() for process in ranks]
    assert [process.returncode for process in ranks] == [0] * num_ranks, "\n".join(said)
    assert sorted(path.name for path in tmp_path.glob("done-*")) == [f"done-{rank}" for rank in range(num_ranks)]

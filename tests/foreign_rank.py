"""Script of test_ranks_meeting.py: takes rank 1's seat with torch alone. argv: the store's port, a folder."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

PATIENCE = timedelta(seconds=5.0)


class RunsCode:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return Path.mkdir, (self._folder / "ran",)


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=1, world_size=2, timeout=PATIENCE
    )
    (folder / "seated").touch()
    groups = [dist.new_group(timeout=PATIENCE, backend="gloo") for _ in range(2)]
    received: list[Any] = [None, None]
    dist.all_gather_object(received, RunsCode(folder), group=groups[1])
    (folder / "received").write_text(str(received))

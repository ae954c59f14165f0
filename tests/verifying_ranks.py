"""Script of test_checkpoint_killed.py, once a rank. argv: a checkpoint's folder, a folder for results."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

from rlhfspec.common.ranks.meeting import joined
from rlhfspec.training.checkpoint import CheckpointStore, folders
from rlhfspec.training.leading import Leader, follow

if __name__ == "__main__":
    place, found = Path(sys.argv[1]), Path(sys.argv[2])
    read: list[str] = []
    fingerprint = folders.fingerprint

    def noted(path: Path) -> dict[str, Any]:
        read.append(f"{int(path.parent.name.removeprefix('step-'))}/{path.name}")
        return fingerprint(path)

    folders.fingerprint = noted
    with joined(timeout_seconds=60.0, silence_seconds=60.0) as ranks:
        nothing: Any = None
        if ranks.rank > 0:
            follow(nothing, ranks)
        else:
            logging.basicConfig(filename=found / "said", level=logging.WARNING)
            leader = Leader(nothing, ranks)
            with CheckpointStore(place, keep=9, verify=leader.verify) as store:
                assert store.latest() == 3
                store.open(3)
            leader.close()
        (found / f"read-{ranks.rank}").write_text(json.dumps(read))

"""Script of test_ranks_meeting.py, once a rank. argv: a folder, and the case: knock or impostor."""

import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from faults.processes import listening

from rlhfspec.common.ranks import store
from rlhfspec.common.ranks.meeting import joined
from rlhfspec.errors import StageStalled


def knock(port: int) -> None:
    """Take the seat of each pair as gloo's initiators do: the pair's number, then a payload."""
    for pair in range(8):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5.0) as connection:
            connection.sendall(pair.to_bytes(8, "little") + bytes(range(256)))


if __name__ == "__main__":
    folder, what = Path(sys.argv[1]), sys.argv[2]
    rank = os.environ["RANK"]
    if what == "impostor" and rank == "1":
        store._proof = lambda *_: bytes(32)  # it has the seat, and not the secret
    try:
        with joined(timeout_seconds=60.0, silence_seconds=60.0) as ranks:
            places = listening(os.getpid())
            for _, port in places:
                knock(port)
            told = {"hosts": sorted({host for host, _ in places}), "gathered": ranks.gather(ranks.rank)}
            (folder / rank).write_text(json.dumps(told))
            ranks.gather("done")
    except StageStalled as error:
        (folder / rank).write_text(str(error))

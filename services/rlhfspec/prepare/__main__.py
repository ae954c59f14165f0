"""`python -m rlhfspec.prepare --connections FILE`: check a job and make its run folder (docs/operator.md).

The job is job.json beside the connections file. Exit codes are those of `worker.exits`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rlhfspec.prepare",
        description="Check job.json, which is beside the connections file, and create or resume its run folder. Exit "
        "codes: 0 done, 78 the job must be changed, 1 any other error.",
    )
    parser.add_argument("--connections", type=Path, required=True, metavar="FILE", help="connections.json")
    connections_file: Path = parser.parse_args().connections
    from rlhfspec.worker.exits import TEMPORARY

    # PID 1 of a container receives only signals that it handles.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(TEMPORARY))
    code = _prepared(connections_file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a library may have left threads behind


def _prepared(connections_file: Path) -> int:
    from rlhfspec.messages.access.connections import Connections
    from rlhfspec.stage.logs import configure
    from rlhfspec.worker.last_words import Ending

    with configure(job="", run="", stage="prepare", worker=0), Ending() as ending:
        from rlhfspec.prepare.folder import log, prepare

        connections = Connections.read(connections_file)
        done = prepare(connections, connections_file.with_name("job.json"))
        ending.said = str(done)
        log.info("%s", done)
    return ending.code


if __name__ == "__main__":
    main()

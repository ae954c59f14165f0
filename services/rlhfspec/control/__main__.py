"""`python -m rlhfspec.control --connections FILE`: observe and report a run until SIGTERM (docs/operator.md)."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlhfspec.cluster.names import TOKEN_FILE


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rlhfspec.control",
        description="Observe a run and report it to the operator until SIGTERM. Exit codes: 0 stopped by SIGTERM, 75 a "
        "server cannot be reached, 78 a restart would fail again, 1 any other error.",
    )
    parser.add_argument("--connections", type=Path, required=True, metavar="FILE", help="connections.json")
    parser.add_argument(
        "--token", type=Path, default=Path(TOKEN_FILE), metavar="FILE", help=f"report token [default: {TOKEN_FILE}]"
    )
    arguments = parser.parse_args()
    from rlhfspec.messages.access.connections import Connections
    from rlhfspec.stage.logs import configure
    from rlhfspec.worker.last_words import Ending

    with configure(job="", run="", stage="control", worker=0), Ending() as ending:
        from rlhfspec.control.run import Control
        from rlhfspec.worker.mirror import mirrored

        connections = Connections.read(arguments.connections)
        mirror = mirrored(connections, "control", 0)
        job = connections.job()
        with configure(job=job.metadata.name, run=connections.uid, stage="control", worker=0):
            Control(connections, job, arguments.token, mirror).run()
            ending.said = "left: it was asked to"
    return ending.code


if __name__ == "__main__":
    raise SystemExit(main())

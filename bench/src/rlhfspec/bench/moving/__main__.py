"""Generator process of the move benchmarks: `python -m rlhfspec.bench.moving NUMBER CORE`."""

from __future__ import annotations

import asyncio
import os
import sys


def main() -> None:
    """Serve requests. Output of libraries goes to standard error; only replies use the pipe."""
    number, core = map(int, sys.argv[1:])
    os.sched_setaffinity(0, {core})
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    from rlhfspec.bench.moving.generator import Generator

    asyncio.run(Generator(number, answers).serve(sys.stdin))


if __name__ == "__main__":
    main()

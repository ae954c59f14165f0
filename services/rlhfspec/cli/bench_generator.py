"""A generator of `rlhfspec bench rebalance` and `migrate`: `python -m rlhfspec.cli.bench_generator NUMBER CORE`."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any


def main() -> None:
    """What libraries print goes to standard error: only answers travel on the pipe."""
    number, core = map(int, sys.argv[1:])
    os.sched_setaffinity(0, {core})
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    from rlhfspec.bench.moving.generator import Generator
    from rlhfspec.generator.load import LoadMeter

    def meter(worker: int, incarnation: str, engine: Any) -> LoadMeter:
        name = f"generator-{worker}"
        return LoadMeter("bench", name, engine, worker=worker, incarnation=incarnation, sequences=engine.sequences)

    asyncio.run(Generator(number, answers, meter).serve(sys.stdin))


if __name__ == "__main__":
    main()

"""`PYTHONPATH=tests python -m faults`: trials of any size, one seed after the other."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from faults import moving
from faults.harness import Disturbed
from faults.trial import alone, trial


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="in all, over --trials")
    parser.add_argument("--trials", type=int, default=1, help="runs that share the kills")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the next ones count on")
    parser.add_argument("--held-seconds", type=float, default=30.0, help="the longest that a process is held")
    parser.add_argument("--alone", metavar="WORKER", help="such as trainer-0: only this one is killed, one kill a time")
    parser.add_argument("--moves", action="store_true", help="with moves under way, and half of the kills in one")
    arguments = parser.parse_args()
    for seed in range(arguments.seed, arguments.seed + arguments.trials):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="rlhfspec-faults-") as folder:
            kills = arguments.kills // arguments.trials
            try:
                if arguments.alone:
                    run = alone(Path(folder), seed, kills, arguments.alone, _say)
                elif arguments.moves:
                    run = moving.trial(Path(folder), seed, kills, _say, held_seconds=arguments.held_seconds)
                else:
                    run = trial(Path(folder), seed, kills, _say, held_seconds=arguments.held_seconds)
            except Disturbed as error:
                sys.exit(str(error))
        _say(f"seed {seed}: equal to the run without faults after {time.monotonic() - began:.0f} s")
        _say(f"  struck: {dict(run.struck)}")
        _say(f"  gone after the supervisor: {_seconds(run.gone_seconds)}")
        _say(f"  the next step after a hold: {_seconds(run.back_seconds)}")


def _seconds(values: list[float]) -> str:
    return ", ".join(f"{seconds:.1f} s" for seconds in values) or "-"


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


main()

"""`PYTHONPATH=tests python -m faults`: trials of any size, one seed after the other."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from faults import lives, moving, vllm
from faults.harness import Disturbed
from faults.trial import alone, trial


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="in all, over --trials")
    parser.add_argument("--trials", type=int, default=1, help="runs that share the kills")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the next ones count on")
    parser.add_argument("--held-seconds", type=float, default=30.0, help="the longest that a process is held")
    parser.add_argument("--alone", metavar="WORKER", help="such as trainer-0: only this one is killed, one kill a time")
    parser.add_argument("--lives", action="store_true", help="short runs, struck where they begin and end")
    parser.add_argument("--moves", action="store_true", help="with moves under way, and half of the kills in one")
    parser.add_argument("--vllm", action="store_true", help="generators have the engine vllm, and children are killed")
    arguments = parser.parse_args()
    if arguments.lives:
        return _lives(arguments.seed, arguments.kills)
    for seed in range(arguments.seed, arguments.seed + arguments.trials):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="rlhfspec-faults-") as folder:
            kills = arguments.kills // arguments.trials
            try:
                if arguments.alone:
                    run = alone(Path(folder), seed, kills, arguments.alone, _say)
                elif arguments.vllm:
                    run = vllm.trial(Path(folder), seed, kills, _say, held_seconds=arguments.held_seconds)
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


def _lives(seed: int, num_kills: int) -> None:
    """Trials of one run each, until so many processes were killed."""
    struck: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    longest, gone = 0.0, [0.0]
    with tempfile.TemporaryDirectory(prefix="rlhfspec-faults-") as folder:
        work_seconds = lives.work_seconds(Path(folder))
    _say(f"the run that nobody strikes takes {work_seconds:.0f} s")
    while struck.total() < num_kills:
        with tempfile.TemporaryDirectory(prefix="rlhfspec-faults-") as folder:
            try:
                run = lives.trial(
                    Path(folder), seed, _say, work_seconds=work_seconds, slack_seconds=30.0, leave_seconds=10.0
                )
            except Disturbed as error:
                sys.exit(str(error))
        struck, ends = struck + run.struck, ends + run.ends
        longest, gone = max(longest, *run.life_seconds), gone + run.gone_seconds
        _say(f"seed {seed}: equal to the run without faults; {struck.total()} kills so far")
        seed += 1
    _say(f"struck: {dict(struck)}")
    _say(f"lives ended: {dict(ends)}, the longest after {longest:.0f} s")
    _say(f"nothing was left after {max(gone):.1f} s at most")


def _seconds(values: list[float]) -> str:
    return ", ".join(f"{seconds:.1f} s" for seconds in values) or "-"


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


main()

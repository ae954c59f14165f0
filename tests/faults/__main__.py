"""`PYTHONPATH=tests python -m faults`: trials of any size, one seed after the other."""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from faults import lives, moving, vllm
from faults.harness import Disturbed
from faults.trial import trial


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="in all, over --trials")
    parser.add_argument("--trials", type=int, default=1, help="runs that share the kills")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the next ones count on")
    parser.add_argument("--held-seconds", type=float, default=30.0, help="the longest that a process is held")
    parser.add_argument("--lives", action="store_true", help="short runs, struck where they begin and end")
    parser.add_argument("--moves", action="store_true", help="with moves under way, and half of the kills in one")
    parser.add_argument("--vllm", action="store_true", help="generators have the engine vllm, and children are killed")
    arguments = parser.parse_args()
    try:
        _lives(arguments.seed, arguments.kills) if arguments.lives else _trials(arguments)
    except Disturbed as error:
        sys.exit(str(error))


def _trials(arguments: argparse.Namespace) -> None:
    kind = vllm.trial if arguments.vllm else moving.trial if arguments.moves else trial
    kills = arguments.kills // arguments.trials
    for seed in range(arguments.seed, arguments.seed + arguments.trials):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="rlhfspec-faults-") as folder:
            run = kind(Path(folder), seed, kills, _say, held_seconds=arguments.held_seconds)
        _say(f"seed {seed}: equal to the run without faults after {time.monotonic() - began:.0f} s")
        _say(f"  struck: {dict(run.struck)}, gone after {max(run.gone_seconds, default=0.0):.1f} s at most")


def _lives(seed: int, num_kills: int) -> None:
    struck: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="rlhfspec-faults-") as folder:
        work_seconds = lives.work_seconds(Path(folder))
    while struck.total() < num_kills:
        with tempfile.TemporaryDirectory(prefix="rlhfspec-faults-") as folder:
            run = lives.trial(
                Path(folder), seed, _say, work_seconds=work_seconds, slack_seconds=30.0, leave_seconds=10.0
            )
        struck += run.struck
        _say(f"seed {seed}: equal to the run without faults; lives ended: {dict(run.ends)}")
        seed += 1
    _say(f"struck: {dict(struck)}")


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


main()

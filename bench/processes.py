"""Measure the overhead of processes: python bench/processes.py [--tiny target|wide] [--repeats 5] [--json FILE].

The same job (GRPO with a reference, two generators, two rewards) runs in turns with and without `--processes`. A step
lasts from one line of steps.jsonl to the next; the first does not count. Printed is the median over repetitions of the
ratio of median steps. Both runs must produce the same curve.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from rlhfspec.bench.generating.results import published
from rlhfspec.bench.stepping.step import WARM_UP_STEPS, StepSettings, run_ours, steps_of
from rlhfspec.tiny.models import ensure

WORKERS = ("roles.generator.workers=2", "roles.reward.workers=2")
WAYS = {"one process": (), "processes": ("--processes",)}


def measured(settings: StepSettings, speculation: str, way: str) -> tuple[float, list[str]]:
    """Return the median seconds per step, and the weights digest after each."""
    sets = [word for override in WORKERS for word in ("--set", override)]
    lines, _ = run_ours(settings, speculation, *sets, *WAYS[way])
    digests = [json.loads(line)["weights_digest"] for line in lines.splitlines()]
    return statistics.median(step.seconds for step in steps_of(lines)[WARM_UP_STEPS:]), digests


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--tiny", choices=("target", "wide"), default="target", help="3.3M or 77M parameters")
    arguments.add_argument("--speculation", default="off")
    arguments.add_argument("--tokens", type=int, default=128)
    arguments.add_argument("--prompts", type=int, default=4)
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    models = ensure()
    settings = StepSettings(
        model=str(getattr(models, given.tiny)),
        draft=str(models.draft),
        num_tokens=given.tokens,
        prompts_per_step=given.prompts,
        steps=given.steps,
        num_threads=given.threads,
    )
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for repetition in range(given.repeats):
        digests = {}
        for way in sorted(WAYS, reverse=repetition % 2 == 1):
            took, digests[way] = measured(replace(settings, seed=repetition), given.speculation, way)
            seconds[way].append(took)
            print(f"repetition {repetition + 1}: {way}: {took:.3f} s a step", flush=True)
        if len(set(map(tuple, digests.values()))) != 1:
            sys.exit("the curves differ")
    ratios = [many / one for one, many in zip(*seconds.values(), strict=True)]
    print(f"{given.tiny}: processes / one process {statistics.median(ratios):.3f}, of {[round(r, 3) for r in ratios]}")
    if given.json:
        given.json.write_text(
            json.dumps({"settings": published(settings, "model", "draft"), "seconds": seconds, "ratios": ratios})
        )


if __name__ == "__main__":
    main()

"""Time `plan()` on a large fleet, next to plain numpy operations on the same arrays.

python bench/plan.py --generators 10000 --sequences 1000000
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from rlhfspec.moves.rebalancing.fleet import Fleet
from rlhfspec.moves.rebalancing.plan import plan


def large_fleet(num_generators: int, num_sequences: int, seed: int = 0) -> Fleet:
    """Return a synthetic fleet of work-bound engines with lognormal lengths."""
    rng = np.random.default_rng(seed)
    return Fleet.of(
        step_seconds=np.full(num_generators, 2.5e-3),
        sequence_seconds=np.full(num_generators, 1e-3),
        free_rows=np.full(num_generators, 64),
        free_tokens=np.full(num_generators, 200_000),
        generator=np.sort(rng.integers(0, num_generators, num_sequences)),
        remaining=128 * rng.lognormal(0.0, 1.0, num_sequences),
        held=rng.integers(20, 2000, num_sequences),
    )


def passing(fleet: Fleet) -> float:
    """Run twenty plain numpy operations over all sequences, as a baseline."""
    total = fleet.remaining
    for _ in range(10):
        total = np.maximum(total * 1.01, fleet.remaining)
    return float(total.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generators", type=int, default=10_000)
    parser.add_argument("--sequences", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    fleet = large_fleet(options.generators, options.sequences)
    planning, plain, of_the_processor = [], [], []
    for _ in range(options.repeats):
        begun, working = time.perf_counter(), time.thread_time()
        planned = plan(fleet, 0.0)
        of_the_processor.append(time.thread_time() - working)
        between = time.perf_counter()
        passing(fleet)
        planning.append(between - begun)
        plain.append(time.perf_counter() - between)
    median, fastest = float(np.median(planning)), min(planning)
    print(f"{options.generators:,} generators, {options.sequences:,} sequences: {planned.num_moves:,} moves")
    processor = float(np.median(of_the_processor))
    print(f"plan(): median {median * 1e3:.1f} ms, fastest {fastest * 1e3:.1f} ms, thread CPU {processor * 1e3:.1f} ms")
    print(f"a plain pass (20 operations): median {np.median(plain) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()

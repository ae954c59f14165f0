"""Measure the benefit of keeping whole groups on one generator: python bench/groups.py [--prompt 500 1000] [--pairs 5].

GRPO runs in one process with two generators and movable samples, in turns with `prefetch: 4`, which splits groups, and
with the default. Printed over all steps are prompt tokens run relative to distinct ones, CPU seconds of engine steps,
and seconds of generation. Both runs must produce the same curve. Prompts are bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

WAYS = {"pieces": 4, "groups": None}
STEPS = 4
REWARDS = "def letters(completion):\n    return sum(map(str.isalpha, completion)) / 8\n"
_COUNTS = "counts.json"


def write_job(folder: Path, given: argparse.Namespace) -> None:
    from rlhfspec.tiny.models import ensure

    drawn = random.Random(0)
    lengths = [drawn.randint(*given.prompt) for _ in range(given.prompts * STEPS)]
    rows = [{"prompt": "".join(drawn.choices("abcdefgh ", k=length))} for length in lengths]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    for way, prefetch in WAYS.items():
        spec: dict[str, Any] = {
            "model": {"path": str(ensure("sums").sums)},
            "dataset": {"path": "data.jsonl", "shuffle": False, "maxPromptTokens": max(given.prompt)},
            "algorithm": {"name": "grpo", "samplesPerPrompt": given.answers, "klCoefficient": 0.0},
            "generation": {"maxTokens": given.answer, "maxSequences": 32, "speculation": {"mode": "off"}},
            "rewards": {"sources": [{"type": "function", "function": "rewards:letters"}]},
            "training": {"steps": STEPS, "promptsPerStep": given.prompts},
            "roles": {"generator": {"workers": 2, "prefetch": prefetch}},
            "checkpoint": {"everySteps": STEPS, "export": False},
            "observability": {"view": "plain", "sampleTexts": 0, "traces": False},
        }
        job = {"apiVersion": "rlhfspec.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "groups"}, "spec": spec}
        (folder / f"{way}.yaml").write_text(yaml.safe_dump(job))


def run_counted(job: Path, out: Path) -> None:
    """Run `rlhfspec run` in this process, counting prefill tokens and CPU seconds of engine steps."""
    from rlhfspec.cli.main import app
    from rlhfspec.engine.base import EngineStep
    from rlhfspec.engine.core import Engine

    counts = {"prompt_tokens": 0, "cpu_seconds": 0.0}
    step = Engine.step

    def counted(engine: Engine) -> EngineStep:
        began = time.thread_time()
        report = step(engine)
        counts["cpu_seconds"] += time.thread_time() - began
        counts["prompt_tokens"] += report.num_prefill_tokens
        return report

    Engine.step = counted  # type: ignore[method-assign]
    app(["run", str(job), "--out", str(out)], standalone_mode=False)
    (out / _COUNTS).write_text(json.dumps(counts))


def run(folder: Path, way: str, turn: int, given: argparse.Namespace) -> tuple[dict[str, float], list[str]]:
    out = folder / f"{way}-{turn}"
    command = [sys.executable, __file__, "--run", str(folder / f"{way}.yaml"), str(out)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    counts = json.loads((out / _COUNTS).read_text())
    distinct = sum(len(json.loads(line)["prompt"]) for line in (folder / "data.jsonl").read_text().splitlines())
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    seconds = sum(line["seconds"]["generation"] for line in lines)
    told = {"tokens": counts["prompt_tokens"] / distinct, "cpu": counts["cpu_seconds"], "generation": seconds}
    return told, [line["weights_digest"] for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, nargs=2, default=(500, 1000), help="tokens of a prompt, from and to")
    parser.add_argument("--prompts", type=int, default=12, help="of a step")
    parser.add_argument("--answers", type=int, default=16, help="to each")
    parser.add_argument("--answer", type=int, default=48, help="tokens of an answer, at most")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--run", type=Path, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        return run_counted(*given.run)
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        write_job(Path(folder), given)
        for turn in range(given.pairs):
            ways = sorted(WAYS, reverse=turn % 2 == 1)
            runs = {way: run(Path(folder), way, turn, given) for way in ways}
            if runs["pieces"][1] != runs["groups"][1]:
                sys.exit("the curves differ")
            pairs.append({way: told for way, (told, _) in runs.items()})
            print(json.dumps(pairs[-1]), flush=True)
    for what in ("tokens", "cpu", "generation"):
        pieces, groups = (statistics.median(pair[way][what] for pair in pairs) for way in ("pieces", "groups"))
        ratio = statistics.median(pair["groups"][what] / pair["pieces"][what] for pair in pairs)
        print(f"{what}: {pieces:.2f} -> {groups:.2f}, {ratio:.3f} in the same pair")


if __name__ == "__main__":
    main()

"""Measure how much idle generators speed up scoring when they help the reference.

    python bench/dry.py [--tiny target|wide] [--pairs 5] [--json FILE]

PPO runs in one-thread processes, two generators with short answers and a reference with long samples, in turns with
and without help. Printed are the seconds from a step's first sample to its last reference score, and those of whole
steps, without the first (loading) and the last. Both runs must produce the same curve.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from rlhfspec.messages.access.connecting import connect
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.records import Plan, WorkerInfo
from rlhfspec.messages.records.metrics import curve
from rlhfspec.stage.bus import Bus
from rlhfspec.telemetry.folder import read_spans
from rlhfspec.tiny.models import ensure

ORDER = {0: "score", 1: "score"}
REWARDS = "def letters(completion):\n    return sum(map(str.isalpha, completion)) / 8\n"


def write_job(folder: Path, given: argparse.Namespace) -> Path:
    """Write a job with prompts of `--prompt-tokens` bytes, one token each, and return its path."""
    models = ensure()
    rows = ({"prompt": f"{number}: " + "and so on, " * (given.prompt_tokens // 11)} for number in range(64))
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    spec: dict[str, Any] = {
        "model": {"path": str(getattr(models, given.tiny))},
        "dataset": {"path": "data.jsonl"},
        "algorithm": {"name": "ppo", "samplesPerPrompt": 4, "klCoefficient": 0.05},
        "generation": {"maxTokens": given.tokens, "ignoreEos": True, "speculation": {"mode": "off"}},
        "rewards": {"sources": [{"type": "function", "function": "rewards:letters"}]},
        "training": {"steps": given.steps, "promptsPerStep": 4},
        "roles": {"generator": {"workers": 2}},
        "checkpoint": {"everySteps": given.steps, "export": False},
        "observability": {"view": "plain", "sampleTexts": 0},
    }
    job = {"apiVersion": "rlhfspec.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "dry"}, "spec": spec}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def run(job: Path, out: str, helped: bool, num_steps: int) -> Path:
    folder = job.parent / out
    command = [sys.executable, "-m", "rlhfspec.cli.start", "run", "--processes", str(job), "--out", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if helped and "(8 of 8)" in line:
                asyncio.run(_order(folder, num_steps - 1))
        if process.wait() != 0:
            sys.exit("".join(said))
    return folder


async def _order(folder: Path, last_step: int) -> None:
    """Publish plans in place of the rebalancer, which stays stopped until the last step."""
    connections = Connections.read(folder / "processes" / "connections.json")
    transport = await connect(connections, "rebalancer", name="rebalancer")
    bus = Bus(transport, "dry", uid=connections.uid, workers={"rebalancer": 1}).of("rebalancer")
    workers = await (await bus.subscribe(WorkerInfo)).pull(max_records=64, timeout_seconds=10.0)
    [rebalancer] = [each.record.pid for each in workers if each.record.stage == "rebalancer"]
    os.kill(rebalancer, signal.SIGSTOP)
    while len(_lines(folder)) < last_step:
        await bus.publish(Plan(id="dry/plan", job="dry", dry=ORDER))
        await asyncio.sleep(0.25)
    os.kill(rebalancer, signal.SIGCONT)
    await transport.close()


def _lines(folder: Path) -> list[str]:
    steps = folder / "steps.jsonl"
    return steps.read_text().splitlines() if steps.exists() else []


def told(folder: Path) -> dict[str, float]:
    began: dict[int, float] = defaultdict(lambda: float("inf"))
    ended: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    by_guests = []
    for span in read_spans(folder):
        if span.name == "generation":
            began[span.step] = min(began[span.step], span.ended)
        by_step = ended[span.name]
        by_step[span.step] = max(by_step[span.step], span.ended)
        if span.name == "reference":
            by_guests.append(span.worker > 0)
    steps = range(2, len(_lines(folder)))
    scored, trained = ended["reference"], ended["training"]
    return {
        "scoring": statistics.median(scored[step] - began[step] for step in steps),
        "step": statistics.median(trained[step] - trained[step - 1] for step in steps),
        "by guests": sum(by_guests) / len(by_guests),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--tiny", choices=("target", "wide"), default="target", help="3.3M or 77M parameters")
    arguments.add_argument("--prompt-tokens", type=int, default=200)
    arguments.add_argument("--tokens", type=int, default=4)
    arguments.add_argument("--steps", type=int, default=6)
    arguments.add_argument("--pairs", type=int, default=5)
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        job = write_job(Path(folder), given)
        for number in range(given.pairs):
            runs = {}
            for way in sorted(("alone", "helped"), reverse=number % 2 == 1):
                runs[way] = run(job, f"{way}-{number}", way == "helped", given.steps)
            curves = [[curve(line) for line in _lines(path)] for path in runs.values()]
            if curves[0] != curves[1]:
                sys.exit("the curves differ")
            pairs.append({way: told(path) for way, path in runs.items()})
            print(json.dumps(pairs[-1]), flush=True)
    ratios = {what: [pair["alone"][what] / pair["helped"][what] for pair in pairs] for what in ("scoring", "step")}
    for what, each in ratios.items():
        print(f"{what}: alone / helped {statistics.median(each):.2f}, of {[round(ratio, 2) for ratio in each]}")
    if given.json:
        given.json.write_text(json.dumps({"settings": vars(given) | {"json": None}, "pairs": pairs, "ratios": ratios}))


if __name__ == "__main__":
    main()

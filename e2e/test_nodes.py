"""Nodes that are drained, and nodes that are cut off."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from installed import IMAGES, Installed, curve_of, example

STEPS = 6
CLUSTER = {"images": IMAGES}


def grpo() -> dict[str, Any]:
    """Two generators, kept apart from one another. A step is long enough for one to leave in the middle of it, and the
    other has room for all that runs."""
    spread = {"scheduling": {"topologyKey": "kubernetes.io/hostname"}}
    job = example(
        "grpo", training={"steps": STEPS, "promptsPerStep": 64}, generation={"maxSequences": 512},
        evaluation=None, checkpoint={"everySteps": 3},
        roles={"generator": {"workers": 2}}, **spread,
    )  # fmt: skip
    return job | {"metadata": {"name": "sums"}}


def test_a_drained_node_loses_no_token(installed: Installed, laptop: Path) -> None:
    """`kubectl drain` evicts a generator: its sequences go on elsewhere, with their KV."""
    job = installed.submit(grpo())
    job.wait_for_step(1, seconds=300)
    nodes = {pod["spec"]["nodeName"]: pod["metadata"]["name"] for pod in job.pods("generator")}
    assert len(nodes) == 2
    trainer = job.pods("trainer")[0]["spec"]["nodeName"]
    [node] = set(nodes) - {trainer}
    generator = nodes[node]
    job.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=170s",
                "--pod-selector=rlhfspec.io/job=sums,rlhfspec.io/role=generator")  # fmt: skip
    job.wait_for_phase("Succeeded", seconds=900)
    job.kubectl("uncordon", node)
    lines = [json.loads(line) for line in (job.folder / "moves.jsonl").read_text().splitlines()]
    moved = [line for line in lines if line["kind"] == "moved"]
    left = Counter(line["how"] for line in moved if "/leave/" in line["id"])
    print(f"{generator} left {node}: {dict(left)}; {len(moved)} moves in all")
    assert left["kv"] >= 1
    assert sum(line["num_recomputed"] for line in moved) == 0
    assert job.curve() == curve_of(laptop)
    job.delete()


@pytest.mark.own
def test_a_node_cut_off_for_a_minute_changes_no_curve(installed: Installed, laptop: Path) -> None:
    job = installed.submit(grpo())
    job.wait_for_step(1, seconds=300)
    trainer = job.pods("trainer")[0]["spec"]["nodeName"]
    other = next(node for node in installed.cluster.nodes if node.name != trainer)
    installed.cluster.cut(other)
    began = time.monotonic()
    job.wait("the minute", lambda: time.monotonic() - began > 60, seconds=90)
    installed.cluster.heal(other)
    job.wait_for_phase("Succeeded", seconds=1200)
    assert job.curve() == curve_of(laptop)
    assert (job.folder / "samples.jsonl").read_bytes() == (laptop / "samples.jsonl").read_bytes()

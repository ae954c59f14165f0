"""A trainer of two nodes of two ranks: pods that meet by a Service, through NetworkPolicies; a killed rank is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from installed import IMAGES, NAMESPACE, Installed, curve_of, example, on_the_laptop

CLUSTER = {"images": IMAGES}
LOSSES = ("policy_loss", "grad_norm", "entropy")
SMALL = {
    "training": {"steps": 8, "optimizer": {"learningRate": 1e-5}, "exactOnPolicy": False, "promptsPerStep": 4},
    "checkpoint": {"everySteps": 1},
}


def test_two_pods_of_two_ranks_learn_what_one_process_learns_though_one_rank_is_killed(
    installed: Installed, tmp_path: Path
) -> None:
    job = example("grpo", evaluation=None, **SMALL) | {"metadata": {"name": "sums"}}
    alone = curve_of(on_the_laptop(job, tmp_path))
    job["spec"]["roles"] = {"trainer": {"nodes": 2, "ranksPerNode": 2}}
    run = installed.submit(job)
    run.wait_for_phase("Running", seconds=400)
    run.wait_for_step(2, seconds=400)
    before = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in run.pods()}
    lines = run.kubectl("logs", "sums-trainer-1", "-n", NAMESPACE).splitlines()
    [pid] = [json.loads(line)["pid"] for line in lines if '"rank": 3' in line]
    kill = f"import os, signal; os.kill({pid}, signal.SIGKILL)"
    run.kubectl("exec", "sums-trainer-1", "-n", NAMESPACE, "--", "python", "-c", kill)
    run.wait("it is named", lambda: "(rank 3 of 4 on node 1)" in json.dumps(run.status), seconds=60)
    run.wait_for_phase("Succeeded", seconds=600)
    after = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in run.pods()}
    again = {name for name in before if before[name] != after.get(name, before[name])}
    assert again == {"sums-trainer-0", "sums-trainer-1"}
    assert run.status["restarts"]["total"] == 1
    found = run.curve()
    assert len(found) == len(alone) == 8
    for ours, theirs in zip(found, alone, strict=True):
        assert ours["reward"] == theirs["reward"]
        for name in LOSSES:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name

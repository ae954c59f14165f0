"""The shipped job in pods on two nodes: it trains, to the laptop's bits, whatever is done to the release meanwhile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from installed import IMAGES, NAMESPACE, Installed, Job, curve_of, example

STEPS = 30 if os.environ.get("E2E_WHOLE") else 20  # the shipped job has 30
CLUSTER = {"images": IMAGES}


def grpo(name: str = "sums", **spec: Any) -> dict[str, Any]:
    training = {"training": {"steps": STEPS}, "checkpoint": {"everySteps": 5}, "evaluation": None}
    job = example("grpo", **({} if STEPS == 30 else training), **spec)
    return job | {"metadata": {"name": name}}


@pytest.fixture(scope="module")
def job(installed: Installed, laptop: Path) -> Job:
    return installed.submit(grpo("sums", roles={"generator": {"workers": 2}}))


@pytest.mark.ci
def test_a_job_on_two_nodes_trains_to_the_bits_of_a_laptop_run(job: Job, laptop: Path) -> None:
    job.wait_for_phase("Running", seconds=240)
    job.wait_for_step(1, seconds=240)
    nodes = {pod["spec"]["nodeName"] for pod in job.pods()}
    assert len(nodes) == 2
    shown = job.kubectl("get", "rlhf", "-n", NAMESPACE)
    assert "Running" in shown
    assert f"/{STEPS}" in shown
    job.wait_for_phase("Succeeded", seconds=900)
    assert job.curve() == curve_of(laptop)
    assert (job.folder / "samples.jsonl").read_bytes() == (laptop / "samples.jsonl").read_bytes()
    assert job.status["restarts"]["total"] == 0
    if STEPS == 30:
        rewards = [line["reward"]["mean"] for line in job.curve()]
        assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3


def test_no_pod_runs_after_the_job_succeeded(job: Job) -> None:
    job.wait_for_phase("Succeeded", seconds=900)
    job.wait("only finished pods", lambda: all(p["status"]["phase"] in ("Succeeded", "Failed") for p in job.pods()),
             seconds=60)  # fmt: skip
    assert "sums-trainer-0" in {pod["metadata"]["name"] for pod in job.pods()}, "its log stays"
    assert job.kubectl("logs", "sums-trainer-0", "-n", NAMESPACE)


def test_upgrade_uninstall_and_reinstall_in_mid_job_lose_nothing(installed: Installed, job: Job, laptop: Path) -> None:
    job.delete()
    again = installed.submit(grpo("sums"))
    again.wait_for_step(1, seconds=300)
    before = {pod["metadata"]["uid"] for pod in again.pods()}
    installed.install(operator={"resources": {"limits": {"memory": "500Mi"}}})
    assert before <= {pod["metadata"]["uid"] for pod in again.pods()}, "an upgrade of the operator touches no pod"
    installed.uninstall()
    assert again.get()["metadata"]["name"] == "sums"
    assert again.kubectl("get", "crd", "rlhfjobs.rlhfspec.io")
    installed.install()
    again.wait_for_phase("Succeeded", seconds=900)
    assert again.curve() == curve_of(laptop)

"""Generators come and go, jobs pause and go on: the curve does not notice."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from installed import IMAGES, NAMESPACE, Installed, Job, curve_of, example

from rlhfspec.cluster import names

STEPS = 8
CLUSTER = {"images": IMAGES}


def grpo() -> dict[str, Any]:
    job = example("grpo", training={"steps": STEPS}, evaluation=None, checkpoint={"everySteps": 3})
    return job | {"metadata": {"name": "sums"}}


def test_scaling_generators_to_four_and_back_keeps_the_curve(installed: Installed, laptop: Path) -> None:
    """By `kubectl scale`, in mid-job; who leaves hands over what it has."""
    job = installed.submit(grpo())
    job.wait_for_step(1, seconds=300)
    for number in (4, 1):
        job.kubectl("scale", "rlhfjob", "sums", "-n", NAMESPACE, f"--replicas={number}")
        job.wait(f"{number} generators", lambda n=number: running(job) == n, seconds=180)  # type: ignore[misc]
        step = job.step
        if number == 4:
            job.wait_for_step(step + 2, seconds=300)
    job.wait_for_phase("Succeeded", seconds=900)
    assert job.curve() == curve_of(laptop)
    assert job.status["restarts"]["counted"] == 0
    job.delete()


def running(job: Job) -> int:
    pods = job.pods("generator")
    return sum(pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"] for pod in pods)


def started(job: Job) -> dict[str, set[tuple[str, int]]]:
    """By role: its containers, as often as they were started."""
    found: dict[str, set[tuple[str, int]]] = {}
    for pod in job.pods():
        for status in pod["status"].get("containerStatuses", []):
            role = pod["metadata"]["labels"][names.ROLE]
            found.setdefault(role, set()).add((pod["metadata"]["uid"], status["restartCount"]))
    return found


def test_suspended_and_resumed(installed: Installed, laptop: Path) -> None:
    job = installed.submit(grpo())
    job.wait_for_step(2, seconds=300)
    job.patch(suspend=True)
    job.wait_for_phase("Suspended", seconds=200)
    suspended = time.monotonic()
    while time.monotonic() < suspended + 60:
        assert not job.pods(), "nothing is held by a suspended job"
        time.sleep(5)
    step = job.step
    assert len(job.curve()) >= step
    job.patch(suspend=False)
    job.wait_for_phase("Running", seconds=300)
    job.wait_for_phase("Succeeded", seconds=900)
    assert job.status["run"]["number"] == 2
    assert job.curve() == curve_of(laptop)
    job.delete()


def test_restarted_by_hand(installed: Installed, laptop: Path) -> None:
    """One role, and no pod of another; then the whole job, from its last checkpoint."""
    job = installed.submit(grpo())
    job.wait_for_step(1, seconds=300)
    before = started(job)
    job.patch(restart={"id": "1", "roles": ["reward"]})
    job.wait("another reward", lambda: bool(started(job).get("reward", set()) - before["reward"]), seconds=120)
    job.wait_for_step(job.step + 1, seconds=300)
    after = started(job)
    assert {role for role in before if after[role] != before[role]} == {"reward"}
    assert job.status["run"]["number"] == 1
    job.patch(restart={"id": "2", "roles": []})
    job.wait("another run", lambda: job.status["run"]["number"] == 2, seconds=200)
    job.wait_for_phase("Succeeded", seconds=900)
    assert job.curve() == curve_of(laptop)
    job.delete()
    job.wait("no pods", lambda: not job.pods(), seconds=60)

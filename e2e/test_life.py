"""However a job's end comes, all that is its own is gone within a minute, and nobody has to patch anything: namespace,
release and CustomResourceDefinition removed in one order or another, with jobs of every phase. A cluster each.

By default two of the orders, by E2E_SEED; with E2E_WHOLE=1 all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cluster import Cluster
from installed import IMAGES, NAMESPACE, Installed, Job, example

from rlhfspec.cluster import names

pytestmark = pytest.mark.own
GONE_SECONDS = 60.0
CRD = f"{names.PLURAL}.{names.GROUP}"
SHORT = {"training": {"steps": 1, "promptsPerStep": 4}, "evaluation": None}
NOT_THERE = {"sources": [{"type": "function", "function": "no_such:reward"}]}
JOBS: dict[str, dict[str, Any]] = {
    "Running": {"training": {"steps": 1000}, "evaluation": None},
    "Succeeded": SHORT,
    "Failed": SHORT | {"rewards": NOT_THERE},
    "Suspended": SHORT | {"suspend": True},
    "Pending": SHORT | {"roles": {"prepare": {"resources": {"requests": {"cpu": "1000"}}}}},
}


@pytest.fixture
def installed() -> Iterator[Installed]:
    with Cluster(images=IMAGES) as cluster:
        installed = Installed(cluster)
        installed.install()
        yield installed


@pytest.fixture
def jobs(installed: Installed) -> dict[str, Job]:
    """One of every phase, by its name in small letters."""
    made = {}
    for phase, spec in JOBS.items():
        made[phase] = installed.submit(example("grpo", **spec) | {"metadata": {"name": phase.lower()}})
    for phase, job in made.items():
        job.wait(f"phase {phase}", lambda job=job, phase=phase: job.phase == phase, seconds=400)  # type: ignore[misc]
    return made


def left_of(cluster: Cluster, *kept: str) -> list[str]:
    """What has the label of a job that is not to be kept."""
    what = ("get", "pods,secrets,configmaps", "-A", "-l", names.JOB, "-o")
    lines = cluster.kubectl(*what, "jsonpath={range .items[*]}{.metadata.name}{'\\n'}{end}").splitlines()
    return [line for line in lines if not line.startswith(kept)]


def wait_until_gone(cluster: Cluster, things: dict[str, Callable[[], Any]]) -> None:
    """All of it, in time: each thing is asked for by what shows what is left."""
    began = time.monotonic()
    while left := {name: found for name, find in things.items() if (found := find())}:
        assert time.monotonic() - began < GONE_SECONDS, f"{left}\n{last_words(cluster)}"
        time.sleep(0.5)
    print(f"all is gone after {time.monotonic() - began:.0f} s")


def last_words(cluster: Cluster) -> str:
    """Of the pods that are still there."""
    pods = cluster.kubectl("get", "pods", "-n", NAMESPACE, "-l", names.JOB, "-o", "name", check=False).split()
    return "\n".join(cluster.kubectl("logs", "-n", NAMESPACE, "--tail=25", pod, check=False)[-4000:] for pod in pods)


def exists(cluster: Cluster, *what: str) -> Callable[[], str]:
    return lambda: cluster.kubectl("get", *what, "--ignore-not-found", "-o", "name", check=False).strip()


def jobs_left(cluster: Cluster) -> Callable[[], list[str]]:
    """None where nobody knows what a job is."""

    def found() -> list[str]:
        lines = cluster.kubectl("get", CRD, "-A", "-o", "name", check=False).splitlines()
        return [line for line in lines if line.startswith(CRD.split(".")[0][:-1])]

    return found


def the_namespace(installed: Installed, jobs: dict[str, Job]) -> None:
    """The release is in it, and goes along."""
    cluster = installed.cluster
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    things = {"namespace": exists(cluster, "namespace", NAMESPACE), "jobs": jobs_left(cluster)}
    wait_until_gone(cluster, things | {"objects": lambda: left_of(cluster)})


def the_release_then_the_jobs(installed: Installed, jobs: dict[str, Job]) -> None:
    """One way for each phase. What was to be left alone stays, and nothing else."""
    cluster = installed.cluster
    installed.uninstall()
    ways = dict(zip(jobs, ("foreground", "background", "foreground", "orphan", "orphan"), strict=True))
    for phase, way in ways.items():
        cluster.kubectl("delete", "rlhf", phase.lower(), "-n", NAMESPACE, f"--cascade={way}", "--wait=false")
    kept = tuple(f"{phase.lower()}-" for phase, way in ways.items() if way == "orphan")
    wait_until_gone(cluster, {"jobs": jobs_left(cluster), "objects": lambda: left_of(cluster, *kept)})
    assert "pending-prepare-0" in left_of(cluster)
    installed.install()
    again = installed.submit(example("grpo", **SHORT) | {"metadata": {"name": "pending"}})
    again.wait("it names what is in its way", lambda: again.reason() == "BadConfig", seconds=10)
    assert "pending-prepare-0" in again.status["message"]
    cluster.kubectl("delete", "pod", "pending-prepare-0", "-n", NAMESPACE)
    again.wait("it goes on", lambda: again.reason() == "" and bool(again.pods()), seconds=30)


def the_definition(installed: Installed, jobs: dict[str, Job]) -> None:
    """With the operator there, which then sees no jobs any more, and goes on when it is back."""
    cluster = installed.cluster
    cluster.kubectl("delete", "crd", CRD, "--wait=false")
    things = {"definition": exists(cluster, "crd", CRD), "jobs": jobs_left(cluster)}
    wait_until_gone(cluster, things | {"objects": lambda: left_of(cluster)})
    installed.install()
    again = installed.submit(example("grpo", **SHORT) | {"metadata": {"name": "again"}})
    again.wait("it begins", lambda: bool(again.pods()), seconds=90)


def the_release_then_the_definition_then_the_namespace(installed: Installed, jobs: dict[str, Job]) -> None:
    cluster = installed.cluster
    installed.uninstall()
    cluster.kubectl("delete", "crd", CRD, "--wait=false")
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    things = {"definition": exists(cluster, "crd", CRD), "namespace": exists(cluster, "namespace", NAMESPACE)}
    wait_until_gone(cluster, things | {"jobs": jobs_left(cluster), "objects": lambda: left_of(cluster)})


ORDERS = (the_namespace, the_release_then_the_jobs, the_definition, the_release_then_the_definition_then_the_namespace)
SEED = int(os.environ.get("E2E_SEED", "0"))
TAKEN = ORDERS if os.environ.get("E2E_WHOLE") else (ORDERS[SEED % 4], ORDERS[(SEED + 1) % 4])


@pytest.mark.parametrize("order", TAKEN, ids=lambda order: order.__name__)
def test_all_objects_of_the_jobs_are_gone_within_a_minute(
    installed: Installed, jobs: dict[str, Job], order: Callable[[Installed, dict[str, Job]], None]
) -> None:
    assert left_of(installed.cluster)
    order(installed, jobs)

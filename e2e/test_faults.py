"""Whatever dies: nothing is lost, nothing is done twice, and the curve is the laptop's, bit for bit.

`E2E_WHOLE=1` strikes 40 times, otherwise 6; between two strikes there is one step at most."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from installed import IMAGES, NAMESPACE, Installed, curve_of, example

from rlhfspec.cluster import names

IS_WHOLE = bool(os.environ.get("E2E_WHOLE"))
KILLS, STEPS = (40, 42) if IS_WHOLE else (6, 8)
SEED = int(os.environ.get("E2E_SEED", "0"))
CLUSTER = {"images": IMAGES}
pytestmark = pytest.mark.own
SERVERS = ("operator", "nats", "redis")
STAGES = ("prompts", "generator", "reward", "reference", "trainer", "rebalancer", "control")


def grpo() -> dict[str, Any]:
    job = example(
        "grpo",
        training={"steps": STEPS},
        evaluation=None,
        checkpoint={"everySteps": 2},
        roles={"generator": {"workers": 2}, "reward": {"workers": 2}},
        failurePolicy={"maxRestarts": 50},
    )
    return job | {"metadata": {"name": "sums"}}


def targets(draw: random.Random) -> Iterator[str]:
    """Kinds of pods, endlessly: of every round each once, the servers of the release among the first six."""
    while True:
        some = draw.sample(STAGES, len(STAGES))
        first = [*SERVERS, *some[: 6 - len(SERVERS)]]
        yield from draw.sample(first, len(first))
        yield from some[6 - len(SERVERS) :]


def containers(installed: Installed) -> dict[str, list[str]]:
    """Ids of those that run, by kind: a job's role, or a component of the release."""
    found: dict[str, list[str]] = {}
    for pod in installed.cluster.get("pods", "-n", NAMESPACE)["items"]:
        labels = pod["metadata"]["labels"]
        kind = labels.get(names.ROLE) or labels["app.kubernetes.io/component"]
        running = [each for each in pod["status"].get("containerStatuses", []) if "running" in each["state"]]
        found.setdefault(kind, []).extend(each["containerID"].rpartition("/")[2] for each in running)
    return found


def kill(container: str) -> int:
    """-9, of all its processes; how many that were. What a process says of itself may be wrong: Redis writes its title
    over its environment."""
    struck = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # it ended meanwhile
                if container in (folder / "cgroup").read_text():
                    os.kill(int(folder.name), signal.SIGKILL)
                    struck += 1
    return struck


def test_every_pod_may_be_killed(installed: Installed, laptop: Path) -> None:
    """The operator's, NATS and Redis among them."""
    draw = random.Random(SEED)
    job = installed.submit(grpo())
    job.wait_for_phase("Running", seconds=300)
    struck: Counter[str] = Counter()
    for kind in targets(draw):
        if struck.total() == KILLS or job.phase == "Succeeded":
            break
        running = containers(installed).get(kind, [])
        if not running or not kill(draw.choice(running)):
            continue  # it is on its way back
        struck[kind] += 1
        step, pause = job.step, draw.uniform(1, 8)
        with suppress(TimeoutError):  # sometimes in the middle of what the last one began
            job.wait("the next step", lambda step=step: job.step > step or job.phase == "Succeeded", seconds=pause)  # type: ignore[misc]
    print(f"struck {struck.total()}: {dict(struck)} until step {job.step}")
    job.wait_for_phase("Succeeded", seconds=1500)
    print(f"restarts {job.status['restarts']}")
    assert struck.total() == KILLS
    assert set(struck) >= set(SERVERS)
    assert job.curve() == curve_of(laptop)
    assert (job.folder / "samples.jsonl").read_bytes() == (laptop / "samples.jsonl").read_bytes()

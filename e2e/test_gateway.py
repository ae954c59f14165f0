"""Clients of a job's gateway: served by its Service while the policy trains, and no sample or curve is another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from installed import IMAGES, NAMESPACE, Installed, Job, curve_of, example
from manifests import pod

from rlhfspec.cluster import names

STEPS = 8
CLUSTER = {"images": IMAGES}
POD = "sums-gateway-0"
AGENT = """
import json, os, time, urllib.request

headers = {"Authorization": f"Bearer {os.environ['TOKEN']}", "Content-Type": "application/json"}
for number in range(1_000_000):
    body = {"model": "policy", "prompt": f"{number % 90}+1=", "seed": number, "max_tokens": 24}
    request = urllib.request.Request(f"{os.environ['URL']}/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            print(json.dumps(json.load(answer)["choices"][0]), flush=True)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        time.sleep(1)
"""


def grpo(**spec: Any) -> dict[str, Any]:
    job = example("grpo", training={"steps": STEPS}, evaluation=None, checkpoint={"everySteps": 3}, **spec)
    return job | {"metadata": {"name": "sums"}}


@pytest.fixture(scope="module")
def job(installed: Installed, laptop: Path) -> Job:
    installed.install(jobs={"gateway": {"ingressFrom": [{"podSelector": {"matchLabels": {"app": "agent"}}}]}})
    return installed.submit(grpo(roles={"gateway": {"workers": 1}}))


def agent_of(job: Job) -> None:
    """Start a pod whose program asks the gateway again and again."""
    serving = job.status["serving"]
    token = {"secretKeyRef": {"name": serving["tokenSecret"], "key": names.TOKEN_KEY}}
    env = [{"name": "URL", "value": serving["url"]}, {"name": "TOKEN", "valueFrom": token}]
    made = pod("agent", "python", "-c", AGENT, image="localhost/rlhfspec:slim", container={"env": env})
    made["metadata"]["namespace"] = NAMESPACE
    job.installed.cluster.apply(made)


def answers(job: Job) -> list[dict[str, Any]]:
    lines = job.kubectl("logs", "agent", "-n", NAMESPACE, check=False).splitlines()
    return [answer for line in lines if line.startswith("{") and "error" not in (answer := json.loads(line))]


def reaches(job: Job, name: str) -> bool:
    address = job.installed.cluster.get("service", names.gateway_name("sums", job.get()["metadata"]["uid"]), "-n",
                                        NAMESPACE)["spec"]["clusterIP"]  # fmt: skip
    program = f"import socket; socket.create_connection(({address!r}, {names.SERVE_PORT}), 3); print('reached')"
    return "reached" in job.kubectl("exec", "-n", NAMESPACE, name, "--", "python", "-c", program, check=False)


def test_agents_talk_to_a_policy_that_trains_and_change_no_bit_of_it(job: Job, laptop: Path) -> None:
    job.wait(
        "a gateway that serves", lambda: bool(job.status.get("serving")) and not job.reason("Serving"), seconds=300
    )
    agent_of(job)
    job.wait("answers", lambda: len(answers(job)) >= 5, seconds=120)
    assert "serves http://" in job.installed.rlhf("status", "sums")
    assert reaches(job, "agent")
    stranger = pod("stranger", "sleep", "3600", image="localhost/rlhfspec:slim")
    stranger["metadata"]["namespace"] = NAMESPACE
    job.installed.cluster.apply(stranger)
    job.kubectl("wait", "-n", NAMESPACE, "pod/stranger", "--for=condition=Ready", "--timeout=60s")
    assert not reaches(job, "stranger"), "the chart's values do not name it"
    job.wait_for_step(2, seconds=300)
    job.kubectl("delete", "pod", POD, "-n", NAMESPACE, "--now")
    num_before = len(answers(job))
    job.wait("answers of the next gateway", lambda: len(answers(job)) >= num_before + 5, seconds=180)
    job.wait_for_phase("Succeeded", seconds=900)
    given = answers(job)
    assert {version for each in given for version in each["weights_versions"]} >= {1, 2}, "while it trained"
    assert job.curve() == curve_of(laptop)
    assert (job.folder / "samples.jsonl").read_bytes() == (laptop / "samples.jsonl").read_bytes()
    assert job.reason("Serving") == "Succeeded"
    assert job.status["restarts"]["counted"] == 0

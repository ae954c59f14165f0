"""A hundred hostile RLHFJobs, on a real API server: each is refused, or soon says in words what is wrong with it, and
meanwhile another tenant's jobs begin as they always do."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Collection, Iterator
from datetime import datetime
from typing import Any

import pytest
from calm import Calm
from cluster import ControlPlane
from hostile_jobs import HARMLESS, REFUSED, TOLD, as_text, manifest
from operators import RELEASE_NAMESPACE, Operator, World, acting, define, grant, until
from shared_servers import SharedServers
from webhooks import Answer, webhook

from rlhfspec.cluster import names

pytestmark = pytest.mark.ci
NAMESPACES = ("calm", "hostile")
NUM_JOBS = 100 if os.environ.get("E2E_WHOLE") else 20
SAYS_SECONDS = 10.0  # so soon a job says what is wrong with it
MOST_GROWTH_BYTES = 100 * 1024**2
PLACE = (names.GROUP, names.VERSION, "hostile", names.PLURAL)


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[ControlPlane]:
    """With a scheduler, which finds no node: a job whose pod is admitted says so."""
    with ControlPlane(scheduler=True) as plane:
        define(plane)
        yield plane


@pytest.fixture(scope="module")
def world(kubernetes: ControlPlane) -> World:
    world = World(kubernetes)
    for name in (RELEASE_NAMESPACE, *NAMESPACES):
        world.namespace(name)
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    world.core.patch_namespace("hostile", {"metadata": {"labels": labels}})
    return world


@pytest.fixture(scope="module")
def operator(
    kubernetes: ControlPlane, world: World, servers: SharedServers, tmp_path_factory: Any
) -> Iterator[Operator]:
    kubeconfig = grant(kubernetes, NAMESPACES)
    with acting(
        Operator(tmp_path_factory.mktemp("operator") / "a", kubeconfig, servers, namespaces=NAMESPACES)
    ) as operator:
        yield operator


@pytest.fixture(scope="module")
def calm(world: World, operator: Operator) -> Calm:
    return Calm(world, operator, "calm")


@pytest.fixture(autouse=True)
def unmoved(operator: Operator, calm: Calm) -> Iterator[None]:
    """Whatever happens in a test: the operator goes on, and so do the jobs of another tenant."""
    before = operator.rss_bytes
    with calm.goes_on():
        yield
    assert operator.process.poll() is None, operator.log[-3000:]
    assert operator.log.count("acts: holds") == 1, "the Lease was lost"
    assert "Traceback" not in operator.log, operator.log[operator.log.index("Traceback") - 500 :][:3000]
    assert operator.rss_bytes - before < MOST_GROWTH_BYTES


def post(world: World, text: str) -> str:
    """What the API server says against it; empty: it takes it. It is asked to be strict, as kubectl does."""
    api = world.kubernetes.client()
    group, version, namespace, plural = PLACE
    path = f"{api.configuration.host}/apis/{group}/{version}/namespaces/{namespace}/{plural}?fieldValidation=Ignore"
    answer = api.rest_client.pool_manager.request(
        "POST", path, body=text.encode(), headers={"Content-Type": "application/json"}
    )
    return "" if answer.status < 300 else str(json.loads(answer.data)["message"])


def jobs_of(world: World) -> dict[str, dict[str, Any]]:
    found = world.jobs.list_namespaced_custom_object(*PLACE)["items"]
    return {job["metadata"]["name"]: job for job in found}


def wait_for_words(world: World, made: Collection[str], *, seconds: float = 60.0) -> dict[str, dict[str, Any]]:
    """The status of each. By the cluster's own times none took longer than SAYS_SECONDS, however slow this machine."""

    def silent() -> set[str]:
        return {name for name in made if not found.get(name, {}).get("status", {}).get("message")}

    found: dict[str, dict[str, Any]] = {}
    end = time.monotonic() + seconds
    while found.update(jobs_of(world)) or silent():
        assert time.monotonic() < end, f"these say nothing: {silent()}"
        time.sleep(0.2)
    slow = {name: seconds for name, job in found.items() if (seconds := seconds_to_words(job)) > SAYS_SECONDS}
    assert not slow, f"these said it late: {slow}"
    return {name: found[name]["status"] for name in made}


def seconds_to_words(job: dict[str, Any]) -> float:
    """From its creation to the condition that tells what is wrong."""
    [healthy] = [each for each in job["status"]["conditions"] if each["type"] == "Healthy"]
    assert healthy["status"] == "False"
    assert healthy["message"]
    since = datetime.fromisoformat(healthy["lastTransitionTime"])
    return (since - datetime.fromisoformat(job["metadata"]["creationTimestamp"])).total_seconds()


@pytest.fixture
def emptied(world: World) -> Iterator[None]:
    """No job is left in the end, whoever held on to it."""
    yield
    for name, job in jobs_of(world).items():
        if job["metadata"].get("finalizers"):
            patch = {"metadata": {"finalizers": None}}
            world.jobs.patch_namespaced_custom_object(*PLACE, name, patch)
    world.jobs.delete_collection_namespaced_custom_object(*PLACE)
    until(lambda: not jobs_of(world), "they are gone")


def test_what_is_absurd_is_refused_and_named(world: World) -> None:
    taken, unnamed = [], {}
    for name, (edits, word) in REFUSED.items():
        refusal = post(world, as_text(manifest(name, edits)))
        if not refusal:
            taken.append(name)
        elif word not in refusal:
            unnamed[name] = refusal[:300]
    assert (taken, unnamed) == ([], {})
    assert not jobs_of(world)


def test_accepted_wrong_jobs_report_what_is_wrong(world: World, emptied: None) -> None:
    for name, (edits, _, _) in TOLD.items():
        assert post(world, as_text(manifest(name, edits))) == "", name
    said = wait_for_words(world, TOLD)
    wrong = {}
    for name, (_, reason, word) in TOLD.items():
        status = said[name]
        if (
            status["reason"] not in ((reason,) if reason else ("BadConfig", "PodRefused"))
            or word not in status["message"]
        ):
            wrong[name] = (status["reason"], status["message"][:300])
    assert wrong == {}


def test_harmless_odd_jobs_wait_for_a_node_like_any_job(world: World, emptied: None) -> None:
    for name, edits in HARMLESS.items():
        assert post(world, as_text(manifest(name, edits))) == "", name
    said = wait_for_words(world, HARMLESS)
    wrong = {name: status["message"][:300] for name, status in said.items() if status["reason"] != "Unschedulable"}
    assert wrong == {}
    jobs, pods = jobs_of(world), world.pods("hostile")
    for name in HARMLESS:
        metadata = pods[names.pod_name(name, names.PREPARE, 0)].metadata
        ours = names.labels_of(name, names.PREPARE, 0) | {names.RUN: said[name]["run"]["uid"]}
        assert metadata.labels == metadata.labels | ours
        [owner] = metadata.owner_references
        assert (owner.kind, owner.uid, owner.controller) == (names.KIND, jobs[name]["metadata"]["uid"], True)
        assert said[name]["run"]["number"] == 1


def test_a_job_with_a_missing_owner_is_garbage_collected(world: World, emptied: None) -> None:
    """As anything in Kubernetes: it was somebody's, who is gone."""
    for name in ("orphan", "orphan-of-a-job"):
        kind, version = ("ConfigMap", "v1") if name == "orphan" else (names.KIND, f"{names.GROUP}/{names.VERSION}")
        uid = "00000000-0000-4000-8000-000000000000"
        owner = {"apiVersion": version, "kind": kind, "name": "nobody", "uid": uid, "controller": True}
        assert post(world, as_text(manifest(name, {"/metadata.ownerReferences": [owner]}))) == ""
    until(lambda: not jobs_of(world), "the garbage collector takes them", seconds=30)
    until(lambda: not world.pods("hostile"), "and their pods", seconds=30)


@pytest.mark.parametrize("how", ["closed", "broken", "silent"])
def test_many_jobs_behind_a_broken_webhook_are_all_reported(world: World, emptied: None, how: str) -> None:
    """Nobody listens there; it answers 500; or it never says a word."""
    enough = threading.Event()

    def silent(pod: dict[str, Any]) -> int:
        enough.wait(20)
        return 500

    answers: dict[str, Answer] = {"broken": lambda pod: 500, "silent": silent}
    url = "https://127.0.0.1:1/" if how == "closed" else ""
    crowd = [f"crowd-{number}" for number in range(NUM_JOBS)]
    with webhook(
        world.kubernetes, how, answers.get(how, lambda pod: []), namespace="hostile", url=url, timeout_seconds=5
    ):
        for name in crowd:
            assert post(world, as_text(manifest(name, {}))) == ""
        said = wait_for_words(world, crowd)
        enough.set()
    assert {status["reason"] for status in said.values()} == {"PodRefused"}
    assert all(f'failed calling webhook "{how}.example.com"' in status["message"] for status in said.values())

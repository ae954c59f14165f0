"""Objects: hers that have the operator's names or labels, the operator's that she changes. Her jobs say so or go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from kubernetes import client
from operators import Operator, World, until, writes_of
from tenant import CALM, HOSTILE, SAYS_SECONDS, Tenant, owner, owner_of

from rlhfspec.cluster import names

pytestmark = pytest.mark.ci
FOREIGN = "evil.example/never"


# --- what has the operator's names already ---------------------------------------------------------------------------


def body_of(kind: str, name: str) -> dict[str, Any]:
    if kind == "pod":
        return {"metadata": {"name": name}, "spec": {"containers": [{"name": "hers", "image": "hers"}]}}
    value = {"config_map": {"data": {"hers": "1"}}, "secret": {"stringData": {"hers": "1"}}}[kind]
    return {"metadata": {"name": name}} | value


NAMES: dict[str, tuple[str, Callable[[str, str], str]]] = {
    "the Secret of prepare": ("secret", lambda job, uid: names.secret_name(job, names.PREPARE, uid)),
    "the ConfigMap": ("config_map", names.config_name),
    "the pod of prepare": ("pod", lambda job, uid: names.pod_name(job, names.PREPARE, 0)),
}


@pytest.mark.parametrize("what", NAMES)
def test_a_foreign_object_with_our_name_is_kept_and_named(tenant: Tenant, job: str, what: str) -> None:
    kind, name_of = NAMES[what]
    name = name_of(job, tenant.make(job, suspend=True))
    tenant.wait_for_phase(HOSTILE, job, "Suspended")
    made = getattr(tenant.core, f"create_namespaced_{kind}")(HOSTILE, body_of(kind, name))
    tenant.change(job, spec={"suspend": False})
    tenant.says(job, "BadConfig", word=name)
    read = getattr(tenant.core, f"read_namespaced_{kind}")
    assert read(name, HOSTILE).metadata.resource_version == made.metadata.resource_version
    getattr(tenant.core, f"delete_namespaced_{kind}")(name, HOSTILE, grace_period_seconds=0)
    until(lambda: owner_of(tenant.pod(job)) and tenant.status(HOSTILE, job)["reason"] != "BadConfig", "it goes on")


@pytest.mark.parametrize("what", NAMES)
def test_a_foreign_object_with_our_name_survives_the_job(tenant: Tenant, job: str, what: str) -> None:
    kind, name_of = NAMES[what]
    name = name_of(job, tenant.make(job, suspend=True))
    made = getattr(tenant.core, f"create_namespaced_{kind}")(HOSTILE, body_of(kind, name))
    tenant.change(job, spec={"suspend": False})
    tenant.says(job, "BadConfig", word=name)
    tenant.delete(job, "Foreground")
    until(lambda: tenant.is_gone(job), "it is gone")
    there = getattr(tenant.core, f"read_namespaced_{kind}")(name, HOSTILE).metadata
    assert (there.uid, there.deletion_timestamp) == (made.metadata.uid, None)
    getattr(tenant.core, f"delete_namespaced_{kind}")(name, HOSTILE, grace_period_seconds=0)


def test_a_foreign_pod_in_place_of_a_stage_is_named_until_removed(tenant: Tenant, job: str) -> None:
    tenant.begun(job)
    name = names.pod_name(job, "reward", 0)
    tenant.core.create_namespaced_pod(HOSTILE, body_of("pod", name))
    tenant.ends(HOSTILE, names.pod_name(job, names.PREPARE, 0))
    tenant.says(job, "BadConfig", word=name)
    tenant.core.delete_namespaced_pod(name, HOSTILE, grace_period_seconds=0)
    until(lambda: owner_of(tenant.pod(job, "reward")), "it goes on")


def test_the_pod_of_an_orphaned_job_is_named_as_in_the_way(tenant: Tenant, job: str) -> None:
    tenant.begun(job)
    tenant.delete(job, "Orphan")
    until(lambda: tenant.is_gone(job), "it is gone")
    tenant.make(job)
    tenant.says(job, "BadConfig", word=names.pod_name(job, names.PREPARE, 0))
    tenant.core.delete_namespaced_pod(names.pod_name(job, names.PREPARE, 0), HOSTILE, grace_period_seconds=0)
    until(lambda: owner_of(tenant.pod(job)) == tenant.job(HOSTILE, job)["metadata"]["uid"], "it goes on")


# --- pods that are, or seem to be, the job's -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["by its labels", "of a job that is no controller", "of calm's job"])
def test_a_pod_that_says_it_completed_is_not_believed(world: World, tenant: Tenant, job: str, how: str) -> None:
    uid = tenant.running(job)
    calms = world.job(CALM, "works")["metadata"]["uid"]
    owners = {"by its labels": [], "of calm's job": [owner("works", calms)]}
    owners["of a job that is no controller"] = [owner(job, uid, controller=False)]
    run = tenant.status(HOSTILE, job)["run"]["uid"]
    labels = names.labels_of(job, "trainer", 0) | {names.RUN: run}
    tenant.fake(f"{job}-fake", labels, *owners[how])
    try:
        tenant.ends(HOSTILE, f"{job}-fake", 0, "completed: step 30")
    except client.ApiException as error:
        assert error.status == 404, "whose owner is not there is taken away"  # noqa: PT017
    time.sleep(1.0)
    assert tenant.status(HOSTILE, job)["phase"] == "Starting"
    tenant.kubernetes.kubectl("delete", "pod", "-n", HOSTILE, f"{job}-fake", "--ignore-not-found", "--now")


def test_a_forged_trainer_pod_is_not_believed_and_is_replaced(tenant: Tenant, job: str) -> None:
    uid, name = tenant.begun(job), names.pod_name(job, "trainer", 0)
    labels = names.labels_of(job, "trainer", 0) | {names.RUN: tenant.status(HOSTILE, job)["run"]["uid"]}
    forged = tenant.fake(name, labels, owner(job, uid), account=names.SERVICE_ACCOUNT).metadata.uid
    tenant.ends(HOSTILE, name, 0, "completed: step 30")
    tenant.ends(HOSTILE, names.pod_name(job, names.PREPARE, 0))
    until(lambda: (pod := tenant.pod(job, "trainer")) and pod.metadata.uid != forged, "the operator makes its own")
    assert tenant.status(HOSTILE, job)["phase"] == "Starting"


@pytest.mark.parametrize("label", [names.RUN, names.MANAGED_BY])
def test_removed_labels_are_restored_or_the_pod_is_replaced(tenant: Tenant, job: str, label: str) -> None:
    """The pod has them again, or another is made."""
    tenant.begun(job)
    before = tenant.pod(job).metadata
    tenant.core.patch_namespaced_pod(before.name, HOSTILE, {"metadata": {"labels": {label: None}}})

    def answered() -> bool:
        now = tenant.pod(job)
        return now is not None and now.metadata.labels.keys() == before.labels.keys()

    until(answered, f"{tenant.status(HOSTILE, job)} {tenant.pod(job)}", seconds=SAYS_SECONDS)


@pytest.mark.parametrize("label", [names.JOB, names.ROLE, names.WORKER])
def test_owner_and_name_identify_a_pod_whatever_its_labels(tenant: Tenant, job: str, label: str) -> None:
    tenant.begun(job)
    name = names.pod_name(job, names.PREPARE, 0)
    tenant.core.patch_namespaced_pod(name, HOSTILE, {"metadata": {"labels": {label: "another"}}})
    tenant.ends(HOSTILE, name)
    tenant.wait_for_phase(HOSTILE, job, "Starting")


def test_a_pod_without_its_owner_is_named_as_in_the_way(tenant: Tenant, job: str) -> None:
    tenant.begun(job)
    name = names.pod_name(job, names.PREPARE, 0)
    tenant.core.patch_namespaced_pod(name, HOSTILE, {"metadata": {"ownerReferences": None}})
    tenant.says(job, "BadConfig", word=name)
    tenant.core.delete_namespaced_pod(name, HOSTILE, grace_period_seconds=0)
    until(lambda: tenant.status(HOSTILE, job)["reason"] == "" and owner_of(tenant.pod(job)), "it goes on")


def test_pods_that_she_deletes_are_made_again(tenant: Tenant, job: str) -> None:
    tenant.running(job)
    before = {name: pod.metadata.uid for name, pod in tenant.pods(HOSTILE).items() if name.startswith(job)}
    tenant.core.delete_collection_namespaced_pod(HOSTILE, label_selector=f"{names.JOB}={job}", grace_period_seconds=0)
    stages = set(before) - {names.pod_name(job, names.PREPARE, 0)}
    until(lambda: all(n in tenant.pods(HOSTILE) and tenant.pods(HOSTILE)[n].metadata.uid != before[n] for n in stages),
          "all are made again")  # fmt: skip


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_a_pod_status_written_by_a_tenant_is_reported(tenant: Tenant, job: str, phase: str) -> None:
    """Without a word of how."""
    tenant.running(job)
    tenant.core.patch_namespaced_pod_status(names.pod_name(job, "reward", 0), HOSTILE, {"status": {"phase": phase}})
    tenant.says(job, "PodsNotReady", "Evicted", "CrashLoop", word="reward-0")


def test_a_finalizer_on_a_pod_of_a_deleted_job_causes_no_busy_loop(
    tenant: Tenant, operator: Operator, job: str
) -> None:
    """It stays as long as she likes, and the operator does not run in circles."""
    tenant.begun(job)
    name = names.pod_name(job, names.PREPARE, 0)
    tenant.core.patch_namespaced_pod(name, HOSTILE, {"metadata": {"finalizers": [FOREIGN]}})
    tenant.delete(job)
    until(lambda: tenant.pods(HOSTILE)[name].metadata.deletion_timestamp, "the pod is to go")
    time.sleep(1.0)
    since = datetime.now(UTC)
    time.sleep(3.0)
    assert len([what for what in writes_of(tenant.kubernetes, operator, since) if what[0] == HOSTILE]) < 3
    tenant.core.patch_namespaced_pod(name, HOSTILE, {"metadata": {"finalizers": None}})
    until(lambda: tenant.is_gone(job) and name not in tenant.pods(HOSTILE), "all is gone")


def test_a_crowd_of_pods_with_our_labels_does_not_affect_the_job(tenant: Tenant, job: str) -> None:
    tenant.begun(job)
    for number in range(100):
        labels = names.labels_of(job, "generator", number) | {names.RUN: "3a9d33b1"}
        tenant.fake(f"crowd-{number}", labels | {"crowd": "yes"})
    tenant.core.delete_collection_namespaced_pod(HOSTILE, label_selector="crowd=yes", grace_period_seconds=0)
    assert owner_of(tenant.pod(job))

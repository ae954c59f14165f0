"""Lives and states: what she writes into a status, how often she changes her mind, and what she takes away."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest
from operators import Operator, World, until, writes_of
from tenant import CALM, HOSTILE, SAYS_SECONDS, Tenant, owner_of

from rlhfspec.cluster import names

from .conftest import DOOMED

pytestmark = pytest.mark.ci
FOREIGN = "evil.example/never"
GONE_SECONDS = 60.0
LONG_AGO, FAR_AWAY = "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z"
HEALTHY = {"type": "Healthy", "status": "False"}
WORKERS = {f"generator-{number}": {"counted": 1} for number in range(5000)}

# What she writes over the status of a job that has begun.
STATUSES: dict[str, Any] = {
    "nothing": None,
    "a memory of nothing": {"internal": None},
    "a memory of words": {"internal": {"number": "one", "state": "open"}},
    "a memory of a list": {"internal": {"number": [1], "workers": ["reward-0"]}},
    "a memory of what nobody knows": {"internal": {"nmber": 1}},
    "a state that there is not": {"internal": {"number": 1, "state": "ajar"}},
    "run 2,000,000,000": {"internal": {"number": 2_000_000_000, "state": "open"}},
    "run -1": {"internal": {"number": -1, "state": "open"}},
    "run 0, which is open": {"internal": {"number": 0, "state": "open"}},
    "run 1e30": {"internal": {"number": 1e30, "state": "closed"}},
    "5,000 workers": {"internal": {"workers": WORKERS}},
    "workers that are none": {"internal": {"workers": {"../../etc": {"counted": 1}, "reward-x": None, "": {}}}},
    "10^18 failures": {"internal": {"workers": {"reward-0": {"counted": 10**18, "restarts": 10**18}}}},
    "a time long ago": {"internal": {"opened": LONG_AGO, "running_since": LONG_AGO, "active_before": 1e308}},
    "a time far away": {"internal": {"opened": FAR_AWAY, "workers": {"prepare-0": {"not_before": FAR_AWAY}}}},
    "a time of words": {"internal": {"opened": "yesterday"}},
    "conditions without times": {"conditions": [HEALTHY, HEALTHY | {"type": "Ready"}]},
    "conditions of her own": {"conditions": [{"type": "Mine", "status": "True", "message": "x" * 32768}]},
    "a success": {"conditions": [{"type": "Succeeded", "status": "True", "reason": "Completed", "message": "hers",
                                  "lastTransitionTime": LONG_AGO}]},
    "numbers out of range": {"gpus": 2**31 - 1, "progress": {"step": 2**31 - 1, "reward": 1e308}},
    "a run of another job": {"run": {"number": 1, "uid": "3a9d33b1", "folder": "/storage/../../etc"}},
    "a text of control characters": {"reason": "\x1b[2J", "message": "\a\u202e\x00", "phase": "Running"},
}  # fmt: skip


def test_any_status_written_by_a_tenant_is_answered(tenant: Tenant) -> None:
    """The job says that something is wrong, or is over, or goes on with the pod of the run that its status says."""
    for number, what in enumerate(STATUSES):
        job = f"told-{number}"
        tenant.begun(job)
        status = STATUSES[what] or dict.fromkeys(tenant.status(HOSTILE, job))
        tenant.write_status(job, status | {"generators": 4242})
        until(lambda job=job: is_answered(tenant, job), f"{what}: {tenant.status(HOSTILE, job)}", seconds=SAYS_SECONDS)
        tenant.delete(job)
    until(lambda: all(tenant.is_gone(f"told-{number}") for number in range(len(STATUSES))), "all are gone")


def is_answered(tenant: Tenant, job: str) -> bool:
    status, pod = tenant.status(HOSTILE, job), tenant.pod(job)
    run = status.get("run", {}).get("uid")
    goes_on = status.get("generators") != 4242 and owner_of(pod) and pod.metadata.labels[names.RUN] == run
    says = status.get("message", "")
    return bool(goes_on or (says and says.isprintable()))


def test_a_status_overwritten_a_hundred_times_is_corrected(tenant: Tenant, job: str) -> None:
    tenant.begun(job)
    for number in range(100):
        tenant.write_status(job, {"message": f"hers {number}"})
    until(lambda: "hers" not in tenant.status(HOSTILE, job)["message"], "the operator has the last word")


def test_suspending_and_resuming_fifty_times_a_second_does_no_harm(tenant: Tenant, job: str) -> None:
    tenant.begun(job)
    for number in range(100):
        tenant.change(job, spec={"suspend": number % 2 == 0})
    until(lambda: owner_of(tenant.pod(job)) and tenant.status(HOSTILE, job)["phase"] == "Pending", "it goes on")
    assert tenant.status(HOSTILE, job)["run"]["number"] < 60


def test_after_a_hundred_restart_ids_the_last_one_counts(tenant: Tenant, job: str) -> None:
    tenant.begun(job)
    for number in range(100):
        tenant.change(job, spec={"restart": {"id": str(number)}})
    until(lambda: tenant.status(HOSTILE, job)["run"].get("restartId") == "99", "the last one counts")
    until(lambda: owner_of(tenant.pod(job)), "it goes on")


def test_a_job_recreated_twenty_times_leaves_no_old_pods(tenant: Tenant, job: str) -> None:
    for _ in range(20):
        uid = tenant.make(job)
        tenant.delete(job)
        until(lambda: tenant.is_gone(job), "it is gone")
    uid = tenant.make(job)
    until(lambda: owner_of(tenant.pod(job)) == uid, "the last one begins", seconds=30)
    until(lambda: {owner_of(p) for p in tenant.pods(HOSTILE).values() if p.metadata.name.startswith(job)} == {uid},
          "nothing of an older one is left")  # fmt: skip


@pytest.mark.parametrize("how", ["Background", "Foreground"])
def test_a_deleted_job_with_a_foreign_finalizer_loses_its_pods(
    tenant: Tenant, operator: Operator, job: str, how: str
) -> None:
    """It is she who holds it; its pods go."""
    tenant.begun(job)
    tenant.change(job, metadata={"finalizers": [FOREIGN]})
    tenant.delete(job, how)
    until(lambda: tenant.pod(job) is None, "its pods go")
    time.sleep(1.0)
    since = datetime.now(UTC)
    time.sleep(2.0)
    assert [what for what in writes_of(tenant.kubernetes, operator, since) if what[0] == HOSTILE] == []
    tenant.change(job, metadata={"finalizers": None})
    until(lambda: tenant.is_gone(job), "it is gone")


@pytest.mark.parametrize(("hard", "word"), [({"pods": "0"}, "pods"), ({"count/secrets": "0"}, "count/secrets")])
def test_a_quota_of_nothing_is_reported_until_it_is_removed(
    tenant: Tenant, job: str, hard: dict[str, str], word: str
) -> None:
    tenant.core.create_namespaced_resource_quota(HOSTILE, {"metadata": {"name": "none"}, "spec": {"hard": hard}})
    until(lambda: tenant.core.read_namespaced_resource_quota("none", HOSTILE).status.hard, "the quota is counted")
    tenant.make(job)
    tenant.says(job, "QuotaExceeded", word=word)
    tenant.core.delete_namespaced_resource_quota("none", HOSTILE)
    until(lambda: owner_of(tenant.pod(job)), "it goes on")


def test_a_limit_range_that_refuses_the_pod_is_reported(tenant: Tenant, job: str) -> None:
    limit = {"type": "Container", "max": {"memory": "1Mi"}}
    tenant.core.create_namespaced_limit_range(HOSTILE, {"metadata": {"name": "tiny"}, "spec": {"limits": [limit]}})
    tenant.make(job, roles={"prepare": {"resources": {"limits": {"memory": "1Gi"}}}})
    tenant.says(job, "PodRefused", "BadConfig", word="maximum memory usage per Container is 1Mi")
    tenant.core.delete_namespaced_limit_range("tiny", HOSTILE)
    until(lambda: owner_of(tenant.pod(job)), "it goes on")


def test_a_missing_service_account_is_reported(tenant: Tenant, job: str) -> None:
    tenant.core.delete_namespaced_service_account(names.SERVICE_ACCOUNT, HOSTILE)
    tenant.make(job)
    tenant.says(job, "PodRefused", word=names.SERVICE_ACCOUNT)
    tenant.core.create_namespaced_service_account(HOSTILE, {"metadata": {"name": names.SERVICE_ACCOUNT}})
    until(lambda: owner_of(tenant.pod(job)), "it goes on")


@pytest.mark.parametrize("namespace", DOOMED)
def test_a_namespace_deleted_with_jobs_of_every_phase_is_removed(tenant: Tenant, world: World, namespace: str) -> None:
    tenant.apply(namespace, "sleeps", {"suspend": True})
    for name in ("waits", "works", "done", "fails"):
        tenant.apply(namespace, name)
    until(lambda: len(tenant.pods(namespace)) == 4, "they begin")
    tenant.ends(namespace, "fails-prepare-0", 78, "spec.model.path: no such folder")
    for name in ("works", "done"):
        tenant.ends(namespace, f"{name}-prepare-0")
    until(lambda: "done-trainer-0" in tenant.pods(namespace), "the trainer is made")
    tenant.ends(namespace, "done-trainer-0", 0, "completed: step 30")
    for name, phase in {"sleeps": "Suspended", "done": "Succeeded", "fails": "Failed"}.items():
        tenant.wait_for_phase(namespace, name, phase)
    how = namespace.partition("-")[2].capitalize()
    tenant.core.delete_namespace(namespace, propagation_policy=how)
    spaces = lambda: {each.metadata.name for each in world.core.list_namespace().items}  # noqa: E731
    until(lambda: namespace not in spaces(), f"{namespace} is gone", seconds=GONE_SECONDS)


def test_events_about_pods_of_another_namespace_are_ignored(tenant: Tenant, world: World, job: str) -> None:
    """Of uids that she would have to know."""
    tenant.begun(job)
    calms = [pod.metadata for pod in world.pods(CALM).values()]
    for number, (name, uid) in enumerate([(each.name, each.uid) for each in calms] * 3):
        about = {"apiVersion": "v1", "kind": "Pod", "namespace": HOSTILE, "name": name, "uid": uid}
        body = {"metadata": {"name": f"hers-{number}"}, "involvedObject": about, "type": "Warning", "count": 9}
        said = {"reason": "FailedMount", "message": 'secret "calm" not found: ' + "x" * 900}
        tenant.core.create_namespaced_event(HOSTILE, body | said)
    time.sleep(1.0)
    jobs = world.jobs.list_namespaced_custom_object(names.GROUP, names.VERSION, CALM, names.PLURAL)["items"]
    assert all("calm" not in job["status"]["message"] for job in jobs)

"""What goes wrong in a cluster is named within ten seconds, in `kubectl get`, `kubectl describe`, `kubectl rlhf why`.

Both times are the cluster's: when it showed the failure (an event, a container's end, a refusal in the audit log), and
when the condition `Healthy` became false. They are printed at the end."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from installed import IMAGES, NAMESPACE, RELEASE, Installed, Job, example
from manifests import pod

pytestmark = pytest.mark.own
CLUSTER = {"images": IMAGES, "gpus": 1, "small_volume_mb": 64}
MOST_SECONDS = 10.0
ADMISSION = "admissionregistration.k8s.io/v1"
BAD_REWARD = """
from pathlib import Path


def boom(completion):
    failed = Path("/storage/runs/judged/first-failure")
    if not failed.exists():
        failed.touch()
    raise LookupError("the judge is not in")
"""


@pytest.fixture(scope="module", autouse=True)
def measured() -> Iterator[list[tuple[str, str, float]]]:
    """What happened, the reason, and the seconds from one to the other."""
    table: list[tuple[str, str, float]] = []
    yield table
    print()
    for happened, reason, seconds in table:
        print(f"{happened:60} {reason:20} {seconds:5.1f} s")


@pytest.fixture
def submit(installed: Installed) -> Iterator[Callable[..., Job]]:
    """Jobs that are gone after the test."""
    jobs = []

    def submit(name: str, **spec: Any) -> Job:
        steps = {"training": {"steps": 40}, "evaluation": None}
        job = example("grpo", **{**steps, **spec}) | {"metadata": {"name": name}}
        jobs.append(installed.submit(job))
        return jobs[-1]

    yield submit
    for job in jobs:
        job.delete()


@pytest.fixture
def shows(measured: list[tuple[str, str, float]], installed: Installed) -> Callable[..., None]:
    def shows(
        job: Job, reason: str, evidence: str, *, after: Callable[[], datetime | None], what: str, words: str = ""
    ) -> None:
        """In all three places, and soon after it happened. `words`: of a process, which `why` alone shows."""
        job.wait(f"reason {reason}", lambda: job.status.get("reason") == reason, seconds=120)
        healthy = next(each for each in job.status["conditions"] if each["type"] == "Healthy")
        assert (healthy["status"], healthy["reason"]) == ("False", reason)
        assert evidence in healthy["message"]
        happened = after()
        assert happened is not None, f"{what} is not shown\n{job.evidence()}"
        seconds = (time_of(healthy["lastTransitionTime"]) - happened).total_seconds()
        measured.append((what, reason, seconds))
        assert -1 <= seconds < MOST_SECONDS, f"{what}\n{job.evidence()}"  # the API server's times are whole seconds
        assert reason in job.kubectl("get", "rlhf", job.name, "-n", NAMESPACE)
        described = job.kubectl("describe", "rlhf", job.name, "-n", NAMESPACE)
        assert reason in described
        assert evidence in " ".join(described.split())
        why = installed.rlhf("why", job.name)
        assert f"{reason} (since" in why or f"Failed: {reason}" in why
        assert evidence in why
        assert words in why
        assert not words or words not in json.dumps(job.status), "the status is read without the right to read logs"

    return shows


def time_of(text: str) -> datetime:
    return datetime.fromisoformat(text)


def event(job: Job, pod: str, reason: str, word: str = "") -> Callable[[], datetime | None]:
    """When the cluster first said so of that pod, since the job was made."""
    made = time_of(job.get()["metadata"]["creationTimestamp"])

    def found() -> datetime | None:
        events = job.installed.cluster.get("events", "-n", NAMESPACE, "--field-selector", f"involvedObject.name={pod}")
        times = [
            time_of(each.get("eventTime") or each["firstTimestamp"])
            for each in events["items"]
            if each["reason"] == reason and word in each["message"]
        ]
        return min((time for time in times if time >= made), default=None)

    return found


def ended(job: Job, role: str) -> Callable[[], datetime | None]:
    """When the first container of the role's pods ended."""

    def found() -> datetime | None:
        states = [status["state"] for pod in job.pods(role) for status in pod["status"].get("containerStatuses", ())]
        return min(
            (time_of(state["terminated"]["finishedAt"]) for state in states if "terminated" in state), default=None
        )

    return found


def ended_and_removed(job: Job, pod: str) -> Callable[[], datetime | None]:
    """When its node said so for the last time, before the operator removed the pod to make it again."""

    def found() -> datetime | None:
        said = None
        for entry in requests_about(job, pod):
            if entry["verb"] == "delete":
                return said
            if entry["user"]["username"].startswith("system:node:"):
                said = time_of(entry["stageTimestamp"])
        return None

    return found


def requests_about(job: Job, pod: str) -> Iterator[dict[str, Any]]:
    made = time_of(job.get()["metadata"]["creationTimestamp"])
    for entry in job.installed.cluster.audit():
        about = entry.get("objectRef", {})
        is_write = entry["verb"] in ("create", "patch", "delete")
        is_pod = about.get("resource") == "pods" and about.get("name") == pod
        if is_write and is_pod and time_of(entry["stageTimestamp"]) >= made:
            yield entry


def refused(job: Job, pod: str) -> Callable[[], datetime | None]:
    """When the API server first said no."""

    def found() -> datetime | None:
        answers = requests_about(job, pod)
        refusals = [entry for entry in answers if entry["responseStatus"]["code"] >= 400]
        return min((time_of(entry["stageTimestamp"]) for entry in refusals), default=None)

    return found


# --- pods that cannot start ------------------------------------------------------------------------------------------


def test_an_image_that_cannot_be_pulled_is_reported(submit: Callable[..., Job], shows: Callable[..., None]) -> None:
    container = {"name": "worker", "imagePullPolicy": "IfNotPresent"}
    reward = {"image": "localhost:1/judge:2", "podTemplate": {"spec": {"containers": [container]}}}
    job = submit("image", roles={"reward": reward})
    failed = event(job, "image-reward-0", "Failed", "ErrImagePull")
    shows(job, "ImagePull", "localhost:1/judge:2", after=failed, what="ErrImagePull")


def test_an_image_missing_on_the_node_is_reported(submit: Callable[..., Job], shows: Callable[..., None]) -> None:
    job = submit("never", roles={"reward": {"image": "localhost/none:1"}})
    failed = event(job, "never-reward-0", "Failed", "ErrImageNeverPull")
    shows(job, "ImagePull", "localhost/none:1", after=failed, what="ErrImageNeverPull")


def test_a_request_for_too_many_gpus_is_reported(submit: Callable[..., Job], shows: Callable[..., None]) -> None:
    job = submit("gpus", roles={"generator": {"resources": {"limits": {"nvidia.com/gpu": 8}}}})
    unscheduled = event(job, "gpus-generator-0", "FailedScheduling")
    evidence = "gpus-generator-0: no node has enough nvidia.com/gpu"
    shows(job, "Unschedulable", evidence, after=unscheduled, what="FailedScheduling: Insufficient nvidia.com/gpu")
    assert job.status["gpus"] == 8


def secret_for_jobs(cluster: Cluster, name: str) -> None:
    cluster.kubectl("create", "secret", "generic", name, "-n", NAMESPACE, "--from-literal=token=x")
    cluster.kubectl("label", "secret", name, "-n", NAMESPACE, "rlhfspec.io/jobs-may-use=true")


def lose(cluster: Cluster, job: Job, secret: str) -> None:
    """Before anything but `prepare` starts."""
    job.wait("it begins", lambda: bool(job.status.get("run", {}).get("uid")), seconds=60)
    cluster.kubectl("delete", "secret", secret, "-n", NAMESPACE)


def test_a_missing_secret_is_reported(cluster: Cluster, submit: Callable[..., Job], shows: Callable[..., None]) -> None:
    secret_for_jobs(cluster, "judge-key")
    mount = {"name": "worker", "volumeMounts": [{"name": "judge", "mountPath": "/etc/judge"}]}
    volume = {"name": "judge", "secret": {"secretName": "judge-key"}}
    job = submit("secret", roles={"reward": {"podTemplate": {"spec": {"containers": [mount], "volumes": [volume]}}}})
    lose(cluster, job, "judge-key")
    unmounted = event(job, "secret-reward-0", "FailedMount", "judge-key")
    shows(job, "MissingSecret", 'secret "judge-key" not found', after=unmounted, what="FailedMount: secret not found")
    secret_for_jobs(cluster, "judge-key")
    job.wait("it goes on", lambda: job.reason() == "", seconds=180)


def test_a_variable_from_a_missing_secret_is_reported(
    cluster: Cluster, submit: Callable[..., Job], shows: Callable[..., None]
) -> None:
    secret_for_jobs(cluster, "nobodys")
    source = {"secretKeyRef": {"name": "nobodys", "key": "token"}}
    container = {"name": "worker", "env": [{"name": "JUDGE", "valueFrom": source}]}
    job = submit("variable", roles={"reward": {"podTemplate": {"spec": {"containers": [container]}}}})
    lose(cluster, job, "nobodys")
    failed = event(job, "variable-reward-0", "Failed", "nobodys")
    shows(job, "MissingSecret", 'secret "nobodys" not found', after=failed, what="CreateContainerConfigError")


# --- pods that are refused -------------------------------------------------------------------------------------------


def test_an_exceeded_quota_is_reported(
    cluster: Cluster, submit: Callable[..., Job], shows: Callable[..., None]
) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few", "namespace": NAMESPACE}}
    cluster.apply(quota | {"spec": {"hard": {"pods": "0"}}})  # more are there: none of them goes
    counted = lambda: cluster.get("resourcequota", "few", "-n", NAMESPACE).get("status", {}).get("hard")  # noqa: E731
    cluster.wait_for("the quota is counted", counted)
    try:
        job = submit("quota")
        no = refused(job, "quota-prepare-0")
        shows(job, "QuotaExceeded", "exceeded quota: few", after=no, what="403: exceeded quota")
    finally:
        cluster.kubectl("delete", "resourcequota", "few", "-n", NAMESPACE)
    job.wait("it goes on", lambda: job.reason() == "" and bool(job.pods()), seconds=30)


def pods_of(job: str) -> dict[str, Any]:
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    return {"rules": [rule], "objectSelector": {"matchLabels": {"rlhfspec.io/job": job}}}


def test_a_refusal_by_an_admission_policy_is_reported(
    cluster: Cluster, submit: Callable[..., Job], shows: Callable[..., None]
) -> None:
    of, name = pods_of("policy"), {"name": "no-pods"}
    match = {"resourceRules": of["rules"], "objectSelector": of["objectSelector"]}
    policy = {"matchConstraints": match, "validations": [{"expression": "false", "message": "not on fridays"}]}
    binding = {"policyName": "no-pods", "validationActions": ["Deny"]}
    cluster.apply(
        {"apiVersion": ADMISSION, "kind": "ValidatingAdmissionPolicy", "metadata": name, "spec": policy},
        {"apiVersion": ADMISSION, "kind": "ValidatingAdmissionPolicyBinding", "metadata": name, "spec": binding},
    )
    wait_until_refused(cluster, "policy", "fridays")
    job = submit("policy")
    shows(job, "PodRefused", "not on fridays", after=refused(job, "policy-prepare-0"), what="422: admission policy")
    cluster.kubectl("delete", "validatingadmissionpolicybinding", "no-pods")
    job.wait("it goes on", lambda: job.reason() == "" and bool(job.pods()), seconds=30)


@pytest.mark.parametrize("name", ["closed", "silent"])
def test_an_unreachable_webhook_is_reported(
    cluster: Cluster, submit: Callable[..., Job], shows: Callable[..., None], name: str
) -> None:
    """Nobody listens there; or somebody who never says a word, which is known only when the time is up."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = 1 if name == "closed" else silent.getsockname()[1]
        refuse_by_webhook(cluster, submit, shows, name, port)


def refuse_by_webhook(
    cluster: Cluster, submit: Callable[..., Job], shows: Callable[..., None], name: str, port: int
) -> None:
    webhook = pods_of(name) | {
        "name": f"{name}.example.com",
        "clientConfig": {"url": f"https://127.0.0.1:{port}/pods"},
        "failurePolicy": "Fail",
        "timeoutSeconds": 15,
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    kind = "ValidatingWebhookConfiguration"
    cluster.apply({"apiVersion": ADMISSION, "kind": kind, "metadata": {"name": name}, "webhooks": [webhook]})
    wait_until_refused(cluster, name, "failed calling webhook")
    job = submit(name)
    no = refused(job, f"{name}-prepare-0")
    shows(
        job, "PodRefused", f'failed calling webhook "{name}.example.com"', after=no, what=f"500: webhook that is {name}"
    )
    cluster.kubectl("delete", kind.lower(), name)
    job.wait("it goes on", lambda: job.reason() == "" and bool(job.pods()), seconds=90)


def wait_until_refused(cluster: Cluster, job: str, word: str) -> None:
    """A pod of such a label: what is configured holds from a moment after."""
    probe = json.dumps(pod("probe", labels={"rlhfspec.io/job": job}))
    asked = ("create", "-n", NAMESPACE, "--dry-run=server", "-f", "-")
    cluster.wait_for(word, lambda: word in cluster.kubectl(*asked, stdin=probe, check=False))


# --- what is wrong within a job --------------------------------------------------------------------------------------


def test_a_missing_reward_function_is_reported(submit: Callable[..., Job], shows: Callable[..., None]) -> None:
    job = submit("nowhere", rewards={"sources": [{"type": "function", "function": "no_such_module:reward"}]})
    evidence = "spec.rewards.sources[0].function"
    shows(job, "BadConfig", evidence, after=ended(job, "prepare"), what="prepare ended with 78")
    assert job.phase == "Failed"


def test_a_failing_reward_function_is_reported(
    installed: Installed, submit: Callable[..., Job], shows: Callable[..., None]
) -> None:
    (installed.storage / "judges.py").write_text(BAD_REWARD)
    first = installed.storage / "runs" / "judged" / "first-failure"
    sources = [{"type": "function", "function": "judges:boom"}]
    job = submit("reward", rewards={"sources": sources}, storage={"runFolder": "runs/judged"})

    def happened() -> datetime | None:
        return datetime.fromtimestamp(first.stat().st_mtime, UTC) if first.exists() else None

    shows(job, "RewardFailing", "reward-0", after=happened, what="a reward raised", words="the judge is not in")


def test_an_unreachable_broker_is_reported(
    cluster: Cluster, submit: Callable[..., Job], shows: Callable[..., None]
) -> None:
    job = submit("broker")
    job.wait_for_step(1, seconds=240)
    assert warnings_of(job) == [], "of a job that starts as it should nothing bad is said"
    nats = f"{RELEASE}-nats"
    cluster.kubectl("scale", "statefulset", nats, "-n", NAMESPACE, "--replicas=0")
    try:
        killed = event(job, f"{nats}-0", "Killing")
        shows(job, "BrokerUnavailable", "NATS", after=killed, what="NATS's pod is asked to end")
    finally:
        cluster.kubectl("scale", "statefulset", nats, "-n", NAMESPACE, "--replicas=1")
    step = job.step
    job.wait("it goes on", lambda: job.reason() == "" and job.step > step, seconds=180)


def warnings_of(job: Job) -> list[str]:
    """What the operator ever said against it."""
    about = f"involvedObject.kind=RLHFJob,involvedObject.name={job.name},type=Warning"
    events = job.installed.cluster.get("events", "-n", NAMESPACE, "--field-selector", about)["items"]
    return [f"{each['reason']}: {each['message']}" for each in events]


def test_a_full_volume_is_reported(
    installed: Installed, cluster: Cluster, submit: Callable[..., Job], shows: Callable[..., None]
) -> None:
    folder = cluster.volume("small", NAMESPACE, small=True)
    cluster.kubectl("wait", "pvc/small", "-n", NAMESPACE, "--for=jsonpath={.status.phase}=Bound", "--timeout=60s")
    cluster.kubectl("label", "pvc/small", "-n", NAMESPACE, "rlhfspec.io/jobs-may-use=true")
    shutil.copytree(installed.storage / "cache", folder / "cache")
    open_to_all(folder)
    job = submit("volume", storage={"claim": "small"})
    job.wait_for_step(1, seconds=240)
    job.wait("all is well", lambda: job.reason() == "", seconds=60)
    fill(folder)
    failed = ended_and_removed(job, "volume-trainer-0")
    shows(job, "StorageFull", "No space left on device", after=failed, what="the trainer ended: volume full")
    (folder / "filling").unlink()
    step = job.step
    job.wait("it goes on", lambda: job.reason() == "" and job.step > step, seconds=180)


def open_to_all(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)


def fill(folder: Path) -> None:
    """To the last byte."""
    with (folder / "filling").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))

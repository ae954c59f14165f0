"""Who reaches whom in a namespace with a job: those whom the map lets, and nobody else."""

from __future__ import annotations

from typing import Any

import pytest
from installed import IMAGES, NAMESPACE, RELEASE, Installed, Job, example
from manifests import pod

from rlhfspec.cluster import names

CLUSTER = {"images": IMAGES}
SERVERS = {f"{RELEASE}-nats": names.NATS_PORT, f"{RELEASE}-redis": names.REDIS_PORT,
           f"{RELEASE}-operator": names.REPORT_PORT, f"{RELEASE}-dashboard": names.DASHBOARD_PORT}  # fmt: skip


@pytest.fixture(scope="module")
def job(installed: Installed) -> Job:
    job = installed.submit(example("grpo", training={"steps": 500}, evaluation=None) | {"metadata": {"name": "sums"}})
    job.wait_for_phase("Running", seconds=300)
    return job


def asker(installed: Installed, name: str, labels: dict[str, str]) -> str:
    """A pod of these labels that waits, admitted as *restricted*."""
    made = pod(name, labels=labels)
    made["metadata"]["namespace"] = NAMESPACE
    installed.cluster.apply(made)
    installed.cluster.kubectl("wait", "-n", NAMESPACE, f"pod/{name}", "--for=condition=Ready", "--timeout=60s")
    return name


def reaches(installed: Installed, name: str, host: str, port: int) -> bool:
    """By address: who may ask no names is not let off for that."""
    said = installed.cluster.kubectl(
        "exec", "-n", NAMESPACE, name, "--", "sh", "-c", f"nc -w 2 {host} {port} </dev/null >/dev/null && echo reached",
        check=False,
    )  # fmt: skip
    return "reached" in said


def addresses(installed: Installed, job: Job) -> dict[str, tuple[str, int]]:
    found: dict[str, tuple[str, int]] = {}
    for service, port in SERVERS.items():
        spec = installed.cluster.get("service", service, "-n", NAMESPACE)["spec"]
        found[service] = (spec["clusterIP"], port)
    for role, port in (("trainer", names.GRPC_PORT), ("generator", names.MOVES_PORT), ("reward", names.HTTP_PORT)):
        found[role] = (job.pods(role)[0]["status"]["podIP"], port)
    return found


def test_a_stranger_reaches_nothing(installed: Installed, job: Job) -> None:
    stranger = asker(installed, "stranger", {"app": "web"})
    reached = {name for name, at in addresses(installed, job).items() if reaches(installed, stranger, *at)}
    assert not reached


def test_a_role_reaches_what_the_map_says(installed: Installed, job: Job) -> None:
    """A pod with a critic's labels: the servers that critics need, and the trainer's weights; no other worker."""
    labels: dict[str, Any] = names.labels_of("other", "critic", 0)
    critic = asker(installed, "critic", labels)
    reached = {name for name, at in addresses(installed, job).items() if reaches(installed, critic, *at)}
    assert reached == {f"{RELEASE}-nats", "trainer"}
    installed.cluster.kubectl("delete", "pod", critic, "-n", NAMESPACE, "--now")


def test_no_pod_holds_another_roles_secret(job: Job) -> None:
    for each in job.pods():
        role = each["metadata"]["labels"][names.ROLE]
        secrets = {v["secret"]["secretName"] for v in each["spec"]["volumes"] if "secret" in v}
        uid = each["metadata"]["ownerReferences"][0]["uid"]
        assert secrets == {names.secret_name(job.name, role, uid)}
    job.delete()

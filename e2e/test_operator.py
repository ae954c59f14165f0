"""The operator as a process, on a real API server: what it does, what it may do, and that only one replica does it."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nats
import pytest
from cluster import ControlPlane
from operators import (
    RELEASE_NAMESPACE,
    USER,
    Operator,
    World,
    grant,
    replica_pod,
    stages_of,
    stopped_at_the_end,
    token_of,
    until,
    writes_of,
)
from redis.asyncio import Redis
from scraping import family, named_anywhere
from shared_servers import NO_REDIS, REDIS, SharedServers
from verbs import bound, refused, unused

from rlhfspec.cluster import names
from rlhfspec.cluster.report import Report
from rlhfspec.operator.shared.release import redis_login
from rlhfspec.runs.live.redis_users import run_of

pytestmark = pytest.mark.ci
NAMESPACES = (
    "life", "again", "wrong", "claim", "quota", "policy", "gone", "reports", "two", "asleep", "owners", "nodes",
)  # fmt: skip


@pytest.fixture(scope="module")
def world(kubernetes: ControlPlane) -> World:
    world = World(kubernetes)
    for name in (RELEASE_NAMESPACE, *NAMESPACES):
        world.namespace(name)
    return world


@pytest.fixture(scope="module")
def operator(
    kubernetes: ControlPlane, world: World, servers: SharedServers, tmp_path_factory: Any
) -> Iterator[Operator]:
    """With the rights that `rbac` says, and no other."""
    kubeconfig = grant(kubernetes, NAMESPACES)
    replica_pod(world, "rl-operator-a")
    namespaces = tuple(name for name in NAMESPACES if name not in ("two", "asleep"))
    folder = tmp_path_factory.mktemp("operator") / "a"
    operator = Operator(
        folder, kubeconfig, servers, namespaces=namespaces, pod="rl-operator-a", redis=REDIS is not None
    )
    with stopped_at_the_end(operator):
        yield operator
    assert "rror" not in operator.log.replace("ClientConnectorError", ""), operator.log


def leaders(world: World) -> list[str]:
    pods = world.core.list_namespaced_pod(RELEASE_NAMESPACE, label_selector=f"{names.LEADER}=true").items
    return [pod.metadata.name for pod in pods]


def test_a_job_goes_from_prepare_to_succeeded(world: World, operator: Operator) -> None:
    world.apply("life", "sums", {"ttlSecondsAfterFinished": 5})
    world.wait_for_pods("life", {"sums-prepare-0"})
    uid = world.job("life", "sums")["metadata"]["uid"]
    config = world.core.read_namespaced_config_map(names.config_name("sums", uid), "life").data
    assert json.loads(config["job.json"])["metadata"]["name"] == "sums"
    assert "finalizers" not in world.job("life", "sums")["metadata"], "nothing of ours holds a job that is deleted"
    world.ends("life", "sums-prepare-0")
    world.wait_for_phase("life", "sums", "Starting")
    running = stages_of(world, "life", "sums")
    assert {"sums-control-0", "sums-trainer-0", "sums-generator-0", "sums-prompts-0", "sums-reward-0"} <= running
    until(lambda: running <= set(world.pods("life")), f"all of {running}")
    for pod in running:
        world.runs("life", pod)
    world.wait_for_phase("life", "sums", "Running")
    world.ends("life", "sums-trainer-0", 0, "completed: step 30")
    status = world.wait_for_phase("life", "sums", "Succeeded")
    assert {each["type"] for each in status["conditions"] if each["status"] == "True"} >= {"Succeeded"}
    until(
        lambda: all(pod.status.phase in ("Succeeded", "Failed") for pod in world.pods("life").values()),
        "whatever ran is gone",
    )
    secret = world.core.read_namespaced_secret(names.secret_name("sums", "reward", uid), "life").data
    mine = ["reward.creds", "reward.key", "reward.pem"]
    assert sorted(secret) == ["ca.pem", *mine, "servers-ca.pem"]
    assert leaders(world) == ["rl-operator-a"]
    until(lambda: world.job("life", "sums") is None, "it is deleted when its time is over")


def test_a_foreign_pod_with_the_name_of_a_job_pod_is_named_and_kept(world: World, operator: Operator) -> None:
    """A pod of somebody's is in the way until it is removed; one of ours whose labels were taken away is ours."""
    own = {"containers": [{"name": "mine", "image": "mine"}], "serviceAccountName": names.SERVICE_ACCOUNT}
    labels = names.labels_of("sums", "prepare", 0)
    world.core.create_namespaced_pod("owners", {"metadata": {"name": "sums-prepare-0", "labels": labels}, "spec": own})
    mine = world.pods("owners")["sums-prepare-0"].metadata.uid
    world.apply("owners", "sums")
    said = world.wait_for_reason("owners", "sums", "BadConfig")["message"]
    assert said == "Pod sums-prepare-0 already exists and does not belong to this job: remove it"
    assert world.pods("owners")["sums-prepare-0"].metadata.uid == mine
    world.core.delete_namespaced_pod("sums-prepare-0", "owners", grace_period_seconds=0)
    until(lambda: "sums-prepare-0" in world.pods("owners"), "the job goes on")
    patch = {"metadata": {"labels": {names.MANAGED_BY: "somebody", names.RUN: "x"}}}
    world.core.patch_namespaced_pod("sums-prepare-0", "owners", patch)
    until(
        lambda: world.pods("owners")["sums-prepare-0"].metadata.labels[names.MANAGED_BY] == names.FIELD_MANAGER,
        "its labels are as they were",
    )
    world.ends("owners", "sums-prepare-0")
    world.wait_for_phase("owners", "sums", "Starting")


def test_a_worker_that_is_started_again_is_counted_where_prometheus_asks(world: World, operator: Operator) -> None:
    world.apply("again", "sums")
    world.wait_for_pods("again", {"sums-prepare-0"})
    world.ends("again", "sums-prepare-0")
    until(lambda: "sums-reward-0" in world.pods("again"), "the stages are made")
    before = world.pods("again")["sums-reward-0"].metadata.uid
    counted = 'rlhfspec_restarts_total{namespace="again",rlhfjob="sums",stage="reward",worker="0"}'
    until(lambda: operator.metrics().get(counted) == 0.0, "it is told before it ever was")
    world.runs("again", "sums-reward-0")
    world.ends("again", "sums-reward-0", 75, "no such host")
    until(lambda: operator.metrics().get(counted) == 1.0, "it is counted")
    until(
        lambda: (pod := world.pods("again").get("sums-reward-0")) is not None and pod.metadata.uid != before,
        "there is another one",
    )
    served = {family(name.partition("{")[0]) for name in operator.metrics()}
    assert {family(name) for name in named_anywhere() if name.startswith("rlhfspec_operator_")} <= served


def test_a_trainer_of_two_nodes_has_a_service_that_its_ranks_meet_by(world: World, operator: Operator) -> None:
    training = {"steps": 30, "promptsPerStep": 16, "optimizer": {"learningRate": 3e-4}}  # on several ranks never exact
    world.apply("nodes", "sums", {"training": training, "roles": {"trainer": {"nodes": 2, "ranksPerNode": 2}}})
    world.wait_for_pods("nodes", {"sums-prepare-0"})
    world.ends("nodes", "sums-prepare-0")
    until(lambda: {"sums-trainer-0", "sums-trainer-1"} <= set(world.pods("nodes")), "a pod a node")
    uid = world.job("nodes", "sums")["metadata"]["uid"]
    service = world.core.read_namespaced_service(names.ranks_name("sums", uid), "nodes")
    assert service.spec.cluster_ip == "None", "headless: its names are the pods'"
    world.core.delete_namespaced_pod("sums-trainer-1", "nodes", grace_period_seconds=0)


def test_a_wrong_job_says_which_field(world: World, operator: Operator) -> None:
    world.apply("wrong", "sums", {"rewards": {"sources": [{"type": "function", "function": "no_such:reward"}]}})
    world.wait_for_pods("wrong", {"sums-prepare-0"})
    world.ends("wrong", "sums-prepare-0")
    until(lambda: "sums-reward-0" in world.pods("wrong"), "the pod that imports the function")
    world.ends("wrong", "sums-reward-0", 78, "spec.rewards.sources[0].function: no module no_such")
    status = world.wait_for_reason("wrong", "sums", "BadConfig")
    assert status["phase"] == "Failed"
    told = "reward-0: spec.rewards.sources[0].function is refused; details: kubectl rlhf why"
    assert status["message"] == told


def test_a_claim_with_the_label_is_mounted(world: World, operator: Operator) -> None:
    metadata = {"name": "mine", "labels": {"rlhfspec.io/jobs-may-use": "true"}}
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    world.core.create_namespaced_persistent_volume_claim("claim", {"metadata": metadata, "spec": spec})
    world.apply("claim", "sums", {"storage": {"claim": "mine"}})
    world.wait_for_pods("claim", {"sums-prepare-0"})
    volumes = world.pods("claim")["sums-prepare-0"].spec.volumes
    claims = [each.persistent_volume_claim.claim_name for each in volumes if each.persistent_volume_claim]
    assert claims == ["mine"]


def test_a_quota_is_named_and_when_it_is_raised_the_job_goes_on(world: World, operator: Operator) -> None:
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "0"}}}
    world.core.create_namespaced_resource_quota("quota", quota)
    until(lambda: world.core.read_namespaced_resource_quota("few", "quota").status.hard, "the quota is counted")
    world.apply("quota", "sums")
    status = world.wait_for_reason("quota", "sums", "QuotaExceeded")
    assert "few" in status["message"]
    world.core.patch_namespaced_resource_quota("few", "quota", {"spec": {"hard": {"pods": "100"}}})
    world.wait_for_pods("quota", {"sums-prepare-0"})
    world.runs("quota", "sums-prepare-0")
    until(lambda: world.status("quota", "sums")["reason"] != "QuotaExceeded", "the quota is forgotten")


def test_the_message_of_a_policy_that_refuses_pods_is_quoted(world: World, operator: Operator) -> None:
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    selected = {"matchLabels": {"kubernetes.io/metadata.name": "policy"}}
    version, name = "admissionregistration.k8s.io/v1", {"name": "no-pods"}
    policy = {
        "matchConstraints": {"resourceRules": [rule]},
        "validations": [{"expression": "false", "message": "not on fridays"}],
    }
    binding = {
        "policyName": "no-pods",
        "validationActions": ["Deny"],
        "matchResources": {"namespaceSelector": selected},
    }
    world.kubernetes.apply(
        {"apiVersion": version, "kind": "ValidatingAdmissionPolicy", "metadata": name, "spec": policy},
        {"apiVersion": version, "kind": "ValidatingAdmissionPolicyBinding", "metadata": name, "spec": binding},
    )
    pod = {"metadata": {"name": "probe"}, "spec": {"containers": [{"name": "a", "image": "a"}]}}
    refused = ("create", "-n", "policy", "-f", "-", "--dry-run=server")
    until(
        lambda: (
            "fridays"
            in world.kubernetes.kubectl(
                *refused, stdin=json.dumps({"apiVersion": "v1", "kind": "Pod", **pod}), check=False
            )
        ),
        "the policy holds",
    )
    world.apply("policy", "sums")
    assert "not on fridays" in world.wait_for_reason("policy", "sums", "PodRefused")["message"]


@pytest.mark.skipif(REDIS is None, reason=NO_REDIS)
@pytest.mark.parametrize("is_away", [False, True], ids=["", "deleted while the operator is away"])
def test_streams_and_redis_users_of_a_job_are_removed_with_it(
    world: World, operator: Operator, servers: SharedServers, is_away: bool
) -> None:
    """Its streams and its users of Redis; streams that bear no mark are somebody else's."""
    world.apply("gone", "sums")
    world.wait_for_pods("gone", {"sums-prepare-0"})
    uid = world.status("gone", "sums")["run"]["uid"]
    asyncio.run(make_strange_stream(servers, uid))
    until(lambda: uid in asyncio.run(runs_in_redis(servers)), "its users are made")
    until(lambda: f"rlhf_sums_{uid}_workerinfo" in asyncio.run(streams(servers, uid)), "and its streams")
    if is_away:
        operator.stop()
    world.kubernetes.kubectl("delete", "-n", "gone", "rlhfjob/sums", "--timeout=60s")
    world.wait_for_pods("gone", set())
    if is_away:
        assert f"rlhf_sums_{uid}_sample" in asyncio.run(streams(servers, uid))
        operator.start()
    until(lambda: asyncio.run(streams(servers, uid)) == [f"rlhf_other_{uid}_sample"], "its streams are gone")
    until(lambda: uid not in asyncio.run(runs_in_redis(servers)), "and its users")


async def make_strange_stream(servers: SharedServers, uid: str) -> None:
    """It bears no mark."""
    bus = await as_operator(servers)
    stream = f"rlhf_other_{uid}_sample"
    asked = {"name": stream, "subjects": [stream.replace("_", ".")], "storage": "memory"}
    answer = await bus.request(f"$JS.API.STREAM.CREATE.{stream}", json.dumps(asked).encode())
    assert "error" not in json.loads(answer.data), answer.data
    await bus.close()


async def runs_in_redis(servers: SharedServers) -> set[str]:
    """Which have users there."""
    assert servers.redis_url is not None
    user, password = redis_login(servers.keys, servers.folder)
    authority = servers.keys.ca_pem.decode()
    async with Redis.from_url(
        servers.redis_url, username=user, password=password, ssl_ca_data=authority, protocol=2
    ) as redis:
        found = [run_of(servers.keys.master, str(name)) for name in await redis.acl_users()]
    return {run.uid for run in found if run is not None}


async def as_operator(servers: SharedServers) -> nats.NATS:
    from rlhfspec.operator.shared.credentials import operator_creds

    file = servers.folder / "operator.creds"
    file.write_bytes(operator_creds(servers.keys))
    tls = ssl.create_default_context(cadata=servers.keys.ca_pem.decode())
    inbox = "_INBOX_operator_release"
    return await nats.connect(servers.nats_url, user_credentials=str(file), tls=tls, inbox_prefix=inbox)


async def streams(servers: SharedServers, uid: str) -> list[str]:
    bus = await as_operator(servers)
    answer = json.loads((await bus.request("$JS.API.STREAM.NAMES", b"{}")).data)
    await bus.close()
    return sorted(name for name in answer["streams"] or () if f"_{uid}_" in name)


# ---- the reports ----------------------------------------------------------------------------------------------------


def post(operator: Operator, servers: SharedServers, path: str, token: str, body: bytes) -> tuple[int, str]:
    tls = ssl.create_default_context(cadata=servers.keys.ca_pem.decode())
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"https://127.0.0.1:{operator.reports}{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=20, context=tls) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_only_the_jobs_own_control_reports(world: World, operator: Operator, servers: SharedServers) -> None:
    for job in ("sums", "others"):
        world.apply("reports", job)
    world.wait_for_pods("reports", {"sums-prepare-0", "others-prepare-0"})
    for job in ("sums", "others"):
        world.ends("reports", f"{job}-prepare-0")
    until(lambda: {"sums-control-0", "others-control-0"} <= set(world.pods("reports")), "their controls are made")
    run = world.status("reports", "sums")["run"]["uid"]
    body = Report(run=run, step=7, total_steps=30, reward=0.5).model_dump_json().encode()
    path, good = names.report_path("reports", "sums"), token_of(world, "reports", "sums-control-0")

    assert post(operator, servers, path, "", body)[0] == 401
    assert post(operator, servers, path, "nonsense", body)[0] == 401
    other_audience = token_of(world, "reports", "sums-control-0", "https://kubernetes.default.svc.cluster.local")
    assert post(operator, servers, path, other_audience, body)[0] == 401
    for pod in ("others-control-0", "sums-trainer-0"):
        assert post(operator, servers, path, token_of(world, "reports", pod), body)[0] == 403, pod
    assert post(operator, servers, names.report_path("reports", "none"), good, body)[0] == 404
    assert post(operator, servers, path, good, b" " * (256 * 1024 + 1))[0] == 413
    assert post(operator, servers, path, good, b'{"run": "1", "stepp": 3}') == (
        422,
        "stepp: Extra inputs are not permitted\n",
    )
    assert post(operator, servers, path, good, body) == (204, "")
    assert post(operator, servers, path, good, body)[0] in (429, 204)  # 204: the machine took its time
    until(lambda: world.status("reports", "sums")["progress"].get("step") == 7, "the step is in the status")
    assert world.status("reports", "sums")["progress"]["reward"] == 0.5

    world.core.delete_namespaced_pod("sums-control-0", "reports", grace_period_seconds=0)
    until(lambda: post(operator, servers, path, good, body)[0] in (401, 403), "a pod that is gone reports no more")


# ---- two replicas ---------------------------------------------------------------------------------------------------


def pair(
    world: World, kubernetes: ControlPlane, servers: SharedServers, folder: Path, namespace: str
) -> list[Operator]:
    kubeconfig = grant(kubernetes, NAMESPACES)
    for name in ("b", "c"):
        replica_pod(world, f"{namespace}-operator-{name}")
    return [
        Operator(
            folder / name,
            kubeconfig,
            servers,
            namespaces=(namespace,),
            release=namespace,
            pod=f"{namespace}-operator-{name}",
        )
        for name in ("b", "c")
    ]


def one_acts(replicas: list[Operator]) -> Operator:
    return until(lambda: next((each for each in replicas if each.acts), None), "one acts", seconds=30)


def test_another_replica_acts_soon_after_the_leader_was_killed(
    world: World, kubernetes: ControlPlane, servers: SharedServers, tmp_path: Path
) -> None:
    first, second = replicas = pair(world, kubernetes, servers, tmp_path, "two")
    with stopped_at_the_end(*replicas):
        leader = one_acts(replicas)
        other = second if leader is first else first
        assert not other.acts
        world.apply("two", "sums")
        world.wait_for_pods("two", {"sums-prepare-0"})
        before = world.pods("two")["sums-prepare-0"].metadata.uid
        leader.kill(signal.SIGKILL)
        leader.process.wait(10)
        world.ends("two", "sums-prepare-0")
        until(lambda: other.acts, "the other acts", seconds=15)
        roles = ("prepare", "control", "prompts", "generator", "reward", "reference", "trainer")
        world.wait_for_pods("two", {f"sums-{role}-0" for role in roles})  # the other goes on with the job
        assert world.pods("two")["sums-prepare-0"].metadata.uid == before
        until(lambda: leaders_of(world, "two") == [other.pod], "the Service finds the new leader")
        uids = {name: pod.metadata.uid for name, pod in world.pods("two").items()}
        leader.start()
        until(lambda: leader.metrics(), "it is back")
        other.stop()  # SIGTERM: it gives the Lease back
        until(lambda: leader.acts, "the first acts again", seconds=10)
        assert {name: pod.metadata.uid for name, pod in world.pods("two").items()} == uids
        assert made_twice(kubernetes, "two") == set()


def leaders_of(world: World, release: str) -> list[str]:
    return [name for name in leaders(world) if name.startswith(release)]


def test_a_leader_that_was_asleep_writes_nothing_when_it_wakes(
    world: World, kubernetes: ControlPlane, servers: SharedServers, tmp_path: Path
) -> None:
    first, second = replicas = pair(world, kubernetes, servers, tmp_path, "asleep")
    with stopped_at_the_end(*replicas):
        leader = one_acts(replicas)
        other = second if leader is first else first
        world.apply("asleep", "sums")
        world.wait_for_pods("asleep", {"sums-prepare-0"})
        leader.kill(signal.SIGSTOP)
        world.ends("asleep", "sums-prepare-0")
        until(lambda: other.acts, "the other acts", seconds=15)
        until(lambda: "sums-trainer-0" in world.pods("asleep"), "the other goes on with the job")
        awake = datetime.now(UTC)
        leader.kill(signal.SIGCONT)
        until(lambda: "stands by" in leader.log, "it knows that it does not act", seconds=15)
        assert writes_of(kubernetes, leader, awake) == []
        assert other.acts
        assert not leader.acts
        assert made_twice(kubernetes, "asleep") == set()


def made_twice(kubernetes: ControlPlane, namespace: str) -> set[tuple[str, str]]:
    """Kind and name of what was created more than once, whoever did, in an audit log that is not empty."""
    made = Counter(
        (what["resource"], what["name"])
        for entry in kubernetes.audit()
        if entry["verb"] == "create"
        and entry["responseStatus"]["code"] == 201
        and "dryRun" not in entry["requestURI"]
        and (what := entry["objectRef"]).get("namespace") == namespace
    )
    assert ("pods", "sums-trainer-0") in made
    return {thing for thing, times in made.items() if times > 1}


# ---- rights ---------------------------------------------------------------------------------------------------------


def test_every_right_is_used_and_no_other_is_missed(kubernetes: ControlPlane, world: World, operator: Operator) -> None:
    """Last: over all that the tests before did. Its rights are those of `rbac`, of which the chart's are made."""
    assert refused(kubernetes.audit(), USER) == set()
    assert unused(bound(kubernetes), kubernetes.audit(), USER) == set()

"""Every reason of a job appears at the first look, with evidence, and goes with its cause."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from operator_world import World, running
from places import ROOT, TESTS

from rlhfspec.cluster.report import Trouble
from rlhfspec.operator.deciding.failures import WHERE
from rlhfspec.operator.deciding.observed import Refusal, Said
from rlhfspec.operator.deciding.reasons import CAUSES, OTHERS
from rlhfspec.operator.deciding.reconcile import reconcile
from rlhfspec.operator.deciding.status import PHASES
from rlhfspec.operator.looking.views import job_view

PAGE = ROOT / "docs" / "conditions.md"
POD = "sums-reward-0"
WHY = "details: kubectl rlhf why"


def starting() -> World:
    world = World()
    world.to_starting()
    return world


def waiting(world: World, reason: str, message: str = "") -> None:
    world.pods[POD]["spec"]["nodeName"] = "node1"
    world.pods[POD]["status"] = {
        "phase": "Pending",
        "containerStatuses": [{"name": "worker", "state": {"waiting": {"reason": reason, "message": message}}}],
    }


def unscheduled(world: World, message: str) -> None:
    condition = world.condition("PodScheduled", False, "Unschedulable", message)
    world.pods[POD]["status"] = {"phase": "Pending", "conditions": [condition]}


@pytest.mark.parametrize(
    ("state", "message", "reason", "evidence"),
    [
        ("ImagePullBackOff", 'Back-off pulling image "a:1": ErrImagePull: not found', "ImagePull", f"{POD}: not found"),
        ("ErrImagePull", "not found", "ImagePull", f"{POD}: not found"),
        ("InvalidImageName", "", "ImagePull", f"{POD}: InvalidImageName"),
        ("CreateContainerConfigError", 'secret "mine" not found', "MissingSecret", f'{POD}: secret "mine" not found'),
    ],
)
def test_a_waiting_container_gives_the_job_its_reason(state: str, message: str, reason: str, evidence: str) -> None:
    world = starting()
    waiting(world, state, message)
    world.settle()
    assert world.healthy() == ("False", reason, evidence)
    assert (world.status["reason"], world.status["message"]) == (reason, evidence)
    world.run_pod(POD)
    world.settle()
    assert world.healthy()[0] == "True"
    assert [event.reason for event in world.events].count(reason) == 1


@pytest.mark.parametrize(
    ("message", "reason", "begins"),
    [
        (
            "0/2 nodes are available: 2 Insufficient nvidia.com/gpu, 1 Insufficient cpu. preemption: ...",
            "Unschedulable",
            f"{POD}: no node has enough nvidia.com/gpu, cpu: 0/2 nodes are available",
        ),
        ("0/2 nodes are available: 2 node(s) had untolerated taint(s).", "Unschedulable", f"{POD}: 0/2 nodes are"),
        ('persistentvolumeclaim "runs" not found', "StorageUnavailable", f'{POD}: persistentvolumeclaim "runs"'),
        (
            "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found",
            "StorageUnavailable",
            f"{POD}: 0/2 nodes are available: pod has unbound",
        ),
    ],
)
def test_an_unschedulable_pod_gives_the_job_its_reason(message: str, reason: str, begins: str) -> None:
    world = starting()
    unscheduled(world, message)
    world.settle()
    assert world.healthy()[:2] == ("False", reason)
    assert world.healthy()[2].startswith(begins)


MOUNT = 'MountVolume.SetUp failed for volume "credentials" : '


def healthy_with(world: World, event: str) -> tuple[str, str, str]:
    observed = world.observed()
    warned = replace(world.view(POD), warnings=(Said("FailedMount", event),))
    pods = tuple(warned if pod.name == POD else pod for pod in observed.pods)
    world.carry_out(reconcile(job_view(world.body), replace(observed, pods=pods), world.settings, world.now))
    return world.healthy()


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (f'{MOUNT}secret "sums-reward" not found', "MissingSecret"),
        (f"{MOUNT}references non-existent secret key: token", "MissingSecret"),
        ("Unable to attach or mount volumes: timed out waiting for the condition", "StorageUnavailable"),
    ],
)
def test_a_warning_event_of_a_pod_gives_the_job_its_reason(event: str, reason: str) -> None:
    world = starting()
    waiting(world, "ContainerCreating")
    assert healthy_with(world, event) == ("False", reason, f"{POD}: {event}")
    world.pods[POD]["status"]["conditions"] = [world.condition("PodReadyToStartContainers", True)]
    assert healthy_with(world, event)[0] == "True", "by now all is mounted"


@pytest.mark.parametrize(
    "event",
    [
        f"{MOUNT}failed to sync secret cache: timed out waiting for the condition",
        f"{MOUNT}failed to sync configmap cache: timed out waiting for the condition",
        f'{MOUNT}object "rl"/"sums-reward" not registered',
        "Unable to attach or mount volumes: failed to process volumes=[storage]: error processing PVC rl/runs: "
        "no relationship found between node 'node2' and this object",
    ],
)
def test_usual_events_of_a_starting_pod_are_no_reason(event: str) -> None:
    world = starting()
    waiting(world, "ContainerCreating")
    assert healthy_with(world, event)[0] == "True"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('pods "sums-reward-0" is forbidden: exceeded quota: small, requested: pods=1', "QuotaExceeded"),
        ('admission webhook "no.example" denied the request: not today', "PodRefused"),
        ('pods "sums-reward-0" is forbidden: violates PodSecurity "restricted:latest": ...', "PodRefused"),
    ],
)
def test_a_refusal_of_the_api_server_gives_the_job_its_reason(message: str, reason: str) -> None:
    world = World()
    world.refuse = {"reward": message}
    world.to_starting()
    assert world.healthy()[:2] == ("False", reason)
    assert message in world.healthy()[2]
    assert world.plan().create == (), "tried so lately"
    assert world.plan().requeue_seconds == 5.0
    world.refuse = {}
    world.pass_time(5).settle()
    world.run_all().settle()
    assert world.healthy()[0] == "True"


@pytest.mark.parametrize("why", ["BrokerUnavailable", "RewardFailing", "Stalled", "StorageFull", "RecordUndeliverable"])
def test_a_trouble_reported_by_control_gives_the_job_its_reason(why: Any) -> None:
    world = running()
    world.say(troubles=(Trouble(reason=why, workers=("reward-0",)),)).settle()
    status, found, message = world.healthy()
    assert (status, found) == ("False", why)
    assert message.endswith(" reward-0; details: kubectl rlhf why")
    world.say().settle()
    assert world.healthy()[0] == "True"


def test_the_operator_reports_a_broker_that_does_not_answer() -> None:
    world = running()
    world.broker = Said("TransportUnavailable", "NATS does not answer")
    world.settle()
    assert world.healthy() == ("False", "BrokerUnavailable", "NATS does not answer")


def ends(code: int, message: str = "", reason: str = "", times: int = 1) -> Callable[[World], None]:
    def happen(world: World) -> None:
        for _ in range(times):
            world.run_all().end_pod(POD, code, message, reason).settle()
            world.pass_time(31).settle()

    return happen


@pytest.mark.parametrize(
    ("happen", "reason", "words"),
    [
        (ends(137, reason="OOMKilled"), "OOMKilled", "it took more memory than its limit"),
        (ends(75, "NATS at tls://nats:4222 is away"), "BrokerUnavailable", f"ended with exit code 75; {WHY}"),
        (ends(75, "storage away: s3://b: no route"), "StorageUnavailable", f"storage away: it does not answer; {WHY}"),
        (ends(1, "[Errno 28] No space left on device"), "StorageFull", f"No space left on device; {WHY}"),
        (ends(1, "boom"), "PodsNotReady", f"ended with exit code 1; {WHY}; it is started again"),
        (ends(139), "PodsNotReady", "killed by SIGSEGV; it is started again"),
        (ends(0), "PodsNotReady", "ended with exit code 0, without being asked to stop; it is started again"),
        (ends(1, "boom", times=2), "CrashLoop", f"2 failures since step 0, the last: ended with exit code 1; {WHY}"),
    ],
)
def test_the_end_of_a_worker_gives_the_job_its_reason(happen: Callable[[World], None], reason: str, words: str) -> None:
    world = running()
    happen(world)
    assert world.healthy() == ("False", reason, f"reward-0: {words}")
    world.run_all().settle()
    assert world.healthy()[1] == ("CrashLoop" if reason == "CrashLoop" else "AsExpected"), "it is back"
    world.say(step=1).settle()
    assert world.healthy()[0] == "True"


def test_a_crash_loop_ends_once_the_worker_stays_up() -> None:
    world = running()
    ends(1, "boom", times=2)(world)
    world.run_all()
    world.say().settle()
    world.pass_time(29)
    assert world.settle().requeue_seconds is not None
    assert world.healthy()[1] == "CrashLoop"
    world.pass_time(1).settle()
    assert world.healthy()[0] == "True"


def test_a_silent_control_is_reported_after_a_minute() -> None:
    world = running()
    world.say(step=1)
    world.pass_time(59).settle()
    assert world.healthy()[0] == "True"
    world.pass_time(1).settle()
    assert world.healthy()[1:] == ("ControlSilent", "sums-control-0 has reported nothing since 00:00:00 UTC")
    message = world.healthy()[2]
    world.pass_time(100).settle()
    assert world.healthy()[2] == message, "the same text, or every look would write"


def test_a_new_leader_waits_a_minute_for_reports_of_control() -> None:
    world = running()
    world.pass_time(300)
    world.listening_since = world.now  # another one was killed, and this one has no report yet
    world.settle()
    assert world.healthy()[0] == "True"
    world.pass_time(60).settle()
    assert world.healthy()[1] == "ControlSilent"


def test_a_pod_that_is_not_ready_for_long_is_named() -> None:
    world = running()
    world.pods[POD]["status"]["conditions"] = [world.condition("Ready", False)]
    world.say().settle()
    assert world.healthy()[0] == "True"
    world.pass_time(60)
    world.say().settle()
    assert world.healthy()[1:] == ("PodsNotReady", f"{POD} is Running and not ready since 00:00:00 UTC")


def test_the_status_shows_the_cause_that_explains_the_others() -> None:
    world = running()
    world.end_pod(POD, 75, "NATS is away")
    world.end_pod("sums-prompts-0", 75, "NATS is away").settle()
    assert world.healthy()[1:] == ("BrokerUnavailable", f"prompts-0: ended with exit code 75; {WHERE} (and 1 more)")


def test_a_refusal_is_not_shown_once_its_pod_exists() -> None:
    world = running()
    world.refusals["Pod", POD] = Refusal("Pod", POD, "Forbidden", "exceeded quota", world.now)
    world.settle()
    assert world.healthy()[0] == "True"


# --- the page --------------------------------------------------------------------------------------------------------


def rows_of(page: str) -> list[tuple[str, ...]]:
    return [tuple(map(str.strip, line.strip("| ").split(" | "))) for line in page.splitlines() if line.startswith("| ")]


def test_the_page_shows_the_table() -> None:
    rows = rows_of(PAGE.read_text())
    causes = [(f"`{cause.reason}`", cause.means, cause.todo) for cause in CAUSES]
    others = [(f"`{reason}`", means, todo) for reason, (means, todo) in OTHERS.items()]
    assert [row for row in rows if row in causes] == causes, "in this order, word for word"
    assert [row for row in rows if row in others] == others
    phases = [(f"`{phase}`", when) for phase, when in PHASES.items()]
    assert [row for row in rows if row in phases] == phases


def test_every_reason_appears_in_some_operator_test() -> None:
    names = ("reasons", "reconcile", "hostile", "kueue")
    files = [file for name in names for file in TESTS.rglob(f"test_operator_{name}.py")]
    assert len(files) == len(names)
    tried = set(re.findall(r'"([A-Z][A-Za-z]+)"', " ".join(file.read_text() for file in files)))
    assert {cause.reason for cause in CAUSES} | set(OTHERS) <= tried


def test_a_foreign_object_in_the_way_is_named_and_retried_soon() -> None:
    """No watch tells when a foreign Secret goes."""
    world = World()
    world.settle()
    secret = "sums-prepare-6f1c-42"
    world.pods.clear()
    world.refusals["Secret", secret] = Refusal("Secret", secret, "AlreadyExists", "already exists", world.now)
    plan = world.reconcile()
    said = f"Secret {secret} already exists and does not belong to this job: remove it"
    assert world.healthy()[1:] == ("BadConfig", said)
    assert (plan.create, plan.requeue_seconds) == ((), pytest.approx(5.0))
    world.pass_time(5)
    assert [thing["kind"] for thing in world.plan().create] == ["ConfigMap", "Secret", "Pod"]


def test_a_pod_of_an_older_job_that_is_still_ending_is_reported() -> None:
    world = World()
    world.settle()
    world.pods.clear()
    world.refusals["Pod", "sums-prepare-0"] = Refusal("Pod", "sums-prepare-0", "Leaving", "already exists", world.now)
    world.settle()
    assert world.healthy()[1:] == ("PodsNotReady", "sums-prepare-0 of an older job with this name is still terminating")

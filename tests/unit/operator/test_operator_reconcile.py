"""A job's life under the operator, step by step."""

from datetime import timedelta
from typing import Any

import pytest
from operator_world import SETTINGS, World, job_body, running

from rlhfspec.operator.deciding.observed import Said
from rlhfspec.operator.deciding.situation import Delete
from rlhfspec.operator.deciding.status import seconds_to_write

WHY = "details: kubectl rlhf why"
STAGES = ("control", "prompts", "generator", "reward", "trainer")


def names_of(deletes: list[Delete]) -> list[str]:
    return [delete.name.removeprefix("sums-") for delete in deletes]


# --- from nothing to the last step ---------------------------------------------------------------------------------


def test_a_job_runs_through_all_phases_until_it_succeeds() -> None:
    world = World()
    world.settle()
    assert (world.phase, list(world.pods)) == ("Pending", ["sums-prepare-0"])
    world.run_all().settle()
    assert world.phase == "Preparing"
    assert world.status["reason"] == "Preparing"
    assert "kubectl rlhf logs sums --role prepare" in world.status["message"]
    world.end_pod("sums-prepare-0", 0, "prepared").settle()
    assert world.phase == "Starting"
    assert world.status["message"] == ""
    assert world.made[1:] == [f"sums-{role}-0" for role in STAGES]
    world.run_all().settle()
    assert world.phase == "Running"
    world.end_pod("sums-trainer-0", 0, "completed: step 10").wind_down()
    assert (world.phase, sorted(world.pods)) == ("Succeeded", ["sums-prepare-0", "sums-trainer-0"])
    assert world.plan().is_quiet
    assert world.plan().requeue_seconds is None, "an ended job costs nothing"
    assert [event.reason for event in world.events] == ["Pending", "Preparing", "Starting", "Running", "Succeeded"]


def test_a_job_that_is_complete_shows_its_last_step() -> None:
    """The control pod may have ended before its report."""
    world = running()
    world.say(step=9, total_steps=10).settle()
    assert world.status["progress"]["shown"] == "9/10"
    world.end_pod("sums-trainer-0", 0, "completed: step 10").settle()
    assert (world.phase, world.status["progress"]["shown"]) == ("Succeeded", "10/10")


def test_pods_of_a_succeeded_job_are_deleted_if_it_says_so() -> None:
    world = running(deletionPolicy={"succeeded": "delete"})
    world.end_pod("sums-trainer-0", 0, "completed: step 10").wind_down()
    assert world.pods == {}


def test_a_trainer_that_left_is_restarted_without_counting() -> None:
    world = running()
    world.end_pod("sums-trainer-0", 0, "left: asked to").settle()
    assert world.phase == "Running"
    assert world.status["restarts"]["total"] == 1
    assert world.status["restarts"]["counted"] == 0


def test_a_wrong_job_starts_only_after_it_is_corrected() -> None:
    world = World(job_body(training={"steps": 0}))
    world.settle()
    assert (world.phase, world.pods) == ("Failed", {})
    assert world.healthy()[1] == "BadConfig"
    assert "spec.training.steps" in world.status["message"]
    world.edit(training={"steps": 3}).settle()
    assert (world.phase, list(world.pods)) == ("Pending", ["sums-prepare-0"])


def test_a_job_without_a_claim_says_which_field_to_set() -> None:
    world = World(settings=SETTINGS.model_copy(update={"claim": None}), labelled={"mine"})
    world.settle()
    completed = world.status["completionTime"]
    world.pass_time(60).settle()
    assert (world.phase, world.status["completionTime"]) == ("Failed", completed)
    assert world.status["message"].startswith("spec.storage.claim: ")
    world.edit(storage={"claim": "mine"}).settle()
    assert world.pods["sums-prepare-0"]["spec"]["volumes"][2]["persistentVolumeClaim"] == {"claimName": "mine"}


def test_a_job_that_prepare_refused_after_an_edit_goes_on_once_it_is_edited_back() -> None:
    world = running()
    world.edit(suspend=True).wind_down()
    assert world.phase == "Suspended"
    world.edit(suspend=False, podTemplate={"spec": {"nodeSelector": {"disk": "old"}}}).settle()
    world.run_all().end_pod("sums-prepare-0", 78, "spec.storage.runFolder: holds the run of another job").settle()
    refused = "prepare-0: spec.storage.runFolder is refused; details: kubectl rlhf why"
    assert (world.phase, world.healthy()) == ("Failed", ("False", "BadConfig", refused))
    world.edit(suspend=True, podTemplate={}).settle()
    assert (world.phase, world.healthy()[0]) == ("Suspended", "True")
    world.edit(suspend=False)
    world.to_running()
    assert "completionTime" not in world.status


# --- workers that fail ---------------------------------------------------------------------------------------------


def test_a_failed_worker_is_restarted_after_a_delay_and_no_other_worker() -> None:
    world = running()
    others = {name: pod["metadata"]["uid"] for name, pod in world.pods.items() if "reward" not in name}
    plan = world.end_pod("sums-reward-0", 1, "boom").settle()
    assert names_of(world.deletes) == []
    assert 0.25 <= plan.requeue_seconds <= 0.5
    world.pass_time(0.5).settle()
    assert names_of(world.deletes) == ["reward-0"]
    assert world.made == ["sums-reward-0"]
    assert others == {name: pod["metadata"]["uid"] for name, pod in world.pods.items() if "reward" not in name}
    assert world.status["restarts"] == {"total": 1, "counted": 1, "byWorker": {"reward-0": 1}}


def fail_again_and_again(world: World, role: str, code: int, times: int, message: str = "boom") -> None:
    for _ in range(times):
        world.run_all().end_pod(f"sums-{role}-0", code, message).settle()
        world.pass_time(31).settle()


def test_too_many_failures_fail_the_job_and_a_trained_step_resets_the_count() -> None:
    world = running(failurePolicy={"maxRestarts": 2})
    fail_again_and_again(world, "reward", 1, 2)
    assert world.healthy()[1] == "CrashLoop"
    world.say(step=1)
    world.run_all().settle()
    assert world.healthy()[0] == "True"
    fail_again_and_again(world, "reward", 1, 2)
    assert world.phase == "Running"
    fail_again_and_again(world, "reward", 1, 1)
    assert (world.phase, world.status["reason"]) == ("Failed", "CrashLoop")
    assert world.status["message"] == f"reward-0: 3 failures since step 1, the last: ended with exit code 1; {WHY}"


def test_a_repeated_step_does_not_reset_the_failure_count() -> None:
    world = running(failurePolicy={"maxRestarts": 2})
    world.say(step=3).settle()
    for _ in range(3):
        fail_again_and_again(world, "trainer", 1, 1)
        for step in (1, 2, 3):  # after its checkpoint
            world.say(step=step).settle()
    assert (world.phase, world.status["reason"]) == ("Failed", "CrashLoop")
    assert world.status["message"] == f"trainer-0: 3 failures since step 3, the last: ended with exit code 1; {WHY}"


def test_killed_workers_do_not_count_unless_the_job_says_so() -> None:
    for counted, num in ((["error"], 0), (["killed"], 3)):
        world = running(failurePolicy={"maxRestarts": 9, "counted": counted})
        fail_again_and_again(world, "reward", 137, 3)
        assert (world.status["restarts"]["counted"], world.status["restarts"]["total"]) == (num, 3)


def test_an_unreachable_broker_never_fails_a_job() -> None:
    world = running(failurePolicy={"maxRestarts": 2})
    world.broker = Said("BrokerUnavailable", "NATS at nats:4222: no answer within 2 s")
    fail_again_and_again(world, "reward", 75, 30, "tls://nats:4222: no answer within 5 s")
    assert (world.phase, world.status["restarts"]["counted"]) == ("Running", 0)
    assert world.healthy()[1] == "BrokerUnavailable"
    world.broker = None
    fail_again_and_again(world, "reward", 75, 3)
    assert world.status["reason"] == "CrashLoop", "the worker alone cannot reach it"


@pytest.mark.parametrize(
    ("role", "message", "reason", "told"),
    [
        ("reward", "exact: sample p1.0: division by zero", "RewardFailing", "ended with exit code 78"),
        ("generator", "spec.generation.maxTokens: too many", "BadConfig", "spec.generation.maxTokens is refused"),
        ("trainer", "loss is not finite", "WorkerFailed", "ended with exit code 78"),
        ("trainer", "[Errno 28] No space left on device", "StorageFull", "No space left on device"),
    ],
)
def test_a_permanent_failure_fails_the_job_at_once(role: str, message: str, reason: str, told: str) -> None:
    world = running()
    world.end_pod(f"sums-{role}-0", 78, message).settle()
    assert (world.phase, world.status["reason"]) == ("Failed", reason)
    assert world.status["message"] == f"{role}-0: {told}; details: kubectl rlhf why"
    assert world.healthy()[1] == reason


@pytest.mark.parametrize(("action", "phase", "counted"), [("FailJob", "Failed", 0), ("Ignore", "Running", 0),
                                                          ("Restart", "Running", 1)])  # fmt: skip
def test_a_failure_policy_rule_takes_precedence_over_counting(action: str, phase: str, counted: int) -> None:
    rules = [{"roles": ["reward"], "exitCodes": [42, 78], "action": action}]
    for code in (42, 78):
        world = running(failurePolicy={"rules": rules})
        world.end_pod("sums-reward-0", code, "boom").settle()
        assert (world.phase, world.status["restarts"]["counted"]) == (phase, counted)
        assert (world.status["reason"] == "FailurePolicy") == (phase == "Failed")
    world = running(failurePolicy={"rules": rules})
    world.end_pod("sums-trainer-0", 42, "boom").settle()
    assert (world.phase, world.status["restarts"]["counted"]) == ("Running", 1), "the rule is for another role"


def test_an_eviction_is_not_the_job_s_fault() -> None:
    world = running(failurePolicy={"maxRestarts": 0})
    for _ in range(30):
        world.run_all()
        world.end_pod("sums-generator-0", 137)
        world.pods["sums-generator-0"]["status"] |= {"reason": "Evicted", "message": "The node was low on memory"}
        world.settle()
        assert world.healthy()[1:] == ("Evicted", "generator-0: Evicted: The node was low on memory")
        world.pass_time(31).settle()
    assert world.phase == "Running"
    assert world.status["restarts"]["counted"] == 0


def test_a_drained_pod_is_replaced_once_it_is_gone() -> None:
    world = running()
    pod = world.pods["sums-generator-0"]
    world.ask_to_end(Delete("Pod", "sums-generator-0", None, pod["metadata"]["uid"]))
    pod["status"]["conditions"].append(world.condition("DisruptionTarget", True, "EvictionByEvictionAPI", "drained"))
    world.settle()
    assert world.healthy()[1] == "Evicted"
    assert world.made == []
    world.end_those_asked().settle()
    assert world.made == ["sums-generator-0"]
    assert world.status["restarts"]["total"] == 0


def test_pods_of_a_lost_node_are_force_deleted_except_the_trainer() -> None:
    world = running()
    for role in ("generator", "trainer"):
        pod = world.pods[f"sums-{role}-0"]
        world.ask_to_end(Delete("Pod", f"sums-{role}-0", 150, pod["metadata"]["uid"]))
        pod["spec"]["nodeName"] = "away"
    world.lost_nodes.add("away")
    world.deletes.clear()
    world.settle()
    assert world.deletes == []
    world.pass_time(166).settle()
    assert [(d.name, d.grace_seconds) for d in world.deletes] == [("sums-generator-0", 0)]
    assert world.made == ["sums-generator-0"]
    assert world.healthy()[1] == "NodeLost"
    assert "sums-trainer-0 is on node away, which does not answer. It is not recreated" in world.healthy()[2]


# --- suspend, restart, deadlines -----------------------------------------------------------------------------------


def test_a_trainer_keeps_its_long_grace_period_when_suspended() -> None:
    template = {"spec": {"terminationGracePeriodSeconds": 3600}}
    world = running(roles={"trainer": {"podTemplate": template}})
    world.edit(suspend=True).settle()
    assert [(d.name, d.grace_seconds) for d in world.deletes] == [("sums-trainer-0", 3600)]


def test_suspend_asks_the_trainer_first_and_resume_opens_the_next_run() -> None:
    world = running()
    first = world.run_uid
    world.edit(suspend=True).settle()
    assert world.phase == "Suspending"
    assert [(d.name, d.grace_seconds) for d in world.deletes] == [("sums-trainer-0", 600)]
    world.wind_down()
    assert (world.phase, world.pods) == ("Suspended", {})
    assert world.plan().is_quiet
    world.edit(suspend=False)
    world.to_running()
    assert world.status["run"]["number"] == 2
    assert {pod["metadata"]["labels"]["rlhfspec.io/run"] for pod in world.pods.values()} == {world.run_uid}
    assert world.run_uid != first


def test_a_withdrawn_suspension_ends_in_a_new_run() -> None:
    world = running()
    world.edit(suspend=True).settle()
    world.edit(suspend=False).wind_down()
    assert world.status["run"]["number"] == 2
    assert list(world.pods) == ["sums-prepare-0"]


def test_a_pod_unseen_at_the_end_of_its_run_is_deleted_later() -> None:
    world = running()
    unseen = world.pods.copy()
    world.edit(suspend=True)
    world.pods.clear()
    world.settle()
    assert world.phase == "Suspended"
    world.pods |= unseen
    world.settle()
    assert (world.phase, names_of(world.deletes)) == ("Suspending", ["trainer-0"])
    world.wind_down()
    assert (world.phase, world.pods) == ("Suspended", {})


def test_a_job_that_is_made_suspended_has_no_run() -> None:
    world = World(job_body(suspend=True))
    world.settle()
    assert (world.phase, world.pods, world.status["run"]["number"]) == ("Suspended", {}, 0)


def test_a_restart_of_one_role_touches_no_other() -> None:
    world = running()
    world.edit(restart={"id": "again", "roles": ["reward"]}).settle()
    assert names_of(world.deletes) == ["reward-0"]
    world.end_those_asked().settle()
    assert world.made == ["sums-reward-0"]
    world.run_all()
    assert world.settle().is_quiet
    assert world.status["run"]["number"] == 1


def test_a_restart_of_all_goes_on_in_the_next_run_once() -> None:
    world = running()
    world.edit(restart={"id": "again"}).settle()
    assert names_of(world.deletes) == ["trainer-0"]
    world.wind_down()
    assert world.status["run"]["number"] == 2
    world.to_running()
    assert world.status["run"]["number"] == 2


def test_a_failed_job_can_be_restarted_by_hand() -> None:
    world = running()
    world.end_pod("sums-trainer-0", 78, "loss is not finite").wind_down()
    assert world.phase == "Failed"
    world.edit(restart={"id": "again"})
    world.to_running()
    assert world.status["run"]["number"] == 2
    assert "completionTime" not in world.status


@pytest.mark.parametrize("field", ["activeDeadlineSeconds", "preRunningDeadlineSeconds"])
def test_a_deadline_fails_the_job(field: str) -> None:
    world = World(job_body(**{field: 100}))
    world.to_starting()
    world.pass_time(90)
    assert world.settle().requeue_seconds == 10.0
    assert world.phase == "Starting"
    world.pass_time(11).settle()
    assert (world.phase, world.status["reason"]) == ("Failed", "DeadlineExceeded")
    assert world.status["message"] == f"spec.{field}: 100 s have passed"


def test_suspended_time_is_not_active_time() -> None:
    world = running(activeDeadlineSeconds=100)
    world.pass_time(60)
    world.edit(suspend=True).wind_down()
    world.pass_time(1000).settle()
    assert world.phase == "Suspended"
    world.edit(suspend=False)
    world.to_running()
    world.pass_time(39).settle()
    assert world.phase == "Running"
    world.pass_time(2).settle()
    assert world.phase == "Failed"


# --- deletion ------------------------------------------------------------------------------------------------------


def test_a_deleted_job_ends_its_trainer_first_then_all_pods() -> None:
    world = running()
    world.delete_job()
    world.settle()
    assert (world.phase, names_of(world.deletes)) == ("Terminating", ["trainer-0"])
    world.wind_down()
    assert (world.phase, world.pods) == ("Terminating", {})
    assert world.plan().is_quiet
    assert world.plan().requeue_seconds is None


@pytest.mark.parametrize("end", ["completed: step 10", "boom"])
def test_a_finished_job_is_deleted_after_its_ttl(end: str) -> None:
    world = running(ttlSecondsAfterFinished=60)
    world.end_pod("sums-trainer-0", 78 if end == "boom" else 0, end).wind_down()
    assert world.plan().requeue_seconds == pytest.approx(60.0)
    world.pass_time(59).settle()
    assert not world.is_gone
    world.pass_time(1)
    world.reconcile()
    assert world.is_gone


# --- generators ----------------------------------------------------------------------------------------------------


def elastic() -> World:
    return running(roles={"generator": {"workers": 1, "replicas": {"min": 1, "max": 3}}})


def generators_of(world: World) -> list[str]:
    return sorted(name for name in world.pods if "generator" in name)


def test_generators_scale_to_the_advice_one_at_a_time() -> None:
    world = elastic()
    world.say(step=1, generators_wanted=9).settle()
    assert generators_of(world) == ["sums-generator-0", "sums-generator-1"]
    world.settle()
    assert len(generators_of(world)) == 2, "the new one is not ready yet"
    world.run_all().settle()
    world.run_all().settle()
    assert len(generators_of(world)) == 3, "as many as may be"
    world.say(step=2, generators_wanted=1).settle()
    assert [(d.name, d.grace_seconds) for d in world.deletes] == [("sums-generator-2", None)]
    world.end_those_asked().settle()
    assert names_of(world.deletes) == ["generator-2", "generator-1"]
    world.end_those_asked()
    assert world.settle().is_quiet
    assert generators_of(world) == ["sums-generator-0"]


def test_old_advice_on_generators_is_ignored() -> None:
    world = elastic()
    world.say(step=1, generators_wanted=3)
    world.pass_time(61).settle()
    assert len(generators_of(world)) == 1


def test_kubectl_scale_is_honoured_within_the_bounds() -> None:
    world = elastic()
    world.edit(roles={"generator": {"workers": 2, "replicas": {"min": 1, "max": 3}}}).settle()
    assert len(generators_of(world)) == 2
    fixed = running(roles={"generator": {"workers": 3}, "reward": {"workers": 2}})
    fixed.edit(roles={"generator": {"workers": 1}, "reward": {"workers": 2}}).wind_down()
    assert generators_of(fixed) == ["sums-generator-0"]
    assert names_of(fixed.deletes) == ["generator-2", "generator-1"]
    assert "sums-rebalancer-0" in fixed.pods, "who takes part in a run is settled when it is opened"


# --- what is written -----------------------------------------------------------------------------------------------


def test_progress_is_written_at_intervals_and_news_at_once() -> None:
    world = running()
    world.say(step=1, reward=0.25).settle()
    old = dict(world.status)
    assert old["progress"]["reward"] == 0.25

    def waits(new: dict[str, Any], since: float | None) -> float | None:
        return seconds_to_write(old, new, None if since is None else world.now - timedelta(seconds=since), world.now)

    world.say(step=1, reward=0.3)
    gauge = world.plan().status
    assert [waits(gauge, since) for since in (None, 0, 4, 5, 60)] == [0, 5, 1, 0, 0]
    world.say(step=2, reward=0.3)
    step = world.plan().status
    assert step["internal"] != old["internal"]
    assert [waits(step, since) for since in (None, 0, 0.25, 1, 60)] == [0, 1, 0.75, 0, 0]
    fewer_ready = {**old, "roles": {}, "generators": 0}
    assert waits(fewer_ready, 0.25) == 0.75
    for news in ({"phase": "Failed"}, {"message": "no"}, {"restarts": {"total": 3}}, {"conditions": []}):
        assert waits({**step, **news}, 0) == 0, news
    assert waits(dict(old), None) is None


def test_passing_time_alone_does_not_change_the_status() -> None:
    world = running()
    world.say(step=1).settle()
    before = dict(world.status)
    for _ in range(20):
        world.pass_time(15)
        world.say(step=1)
        assert world.plan().status == before
        assert world.plan().is_quiet


def test_a_stale_copy_of_the_job_is_ignored() -> None:
    world = running()
    status = world.status
    world.edit(restart={"id": "again"}).wind_down()
    world.body["status"] = status
    plan = world.plan()
    assert plan.is_quiet
    assert plan.status == status

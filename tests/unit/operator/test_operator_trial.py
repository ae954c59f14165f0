"""Trial creation of pods, once for each user input before the first pod."""

from operator_world import World, job_body, running, view_of

from rlhfspec.cluster import names
from rlhfspec.cluster.api import ApiResponse
from rlhfspec.operator.making import trial

REWARD = {"podTemplate": {"spec": {"nodeSelector": [1]}}}
ODD = {"roles": {"reward": REWARD, "prepare": {"resources": {"limits": {"a": 1}}}}}
SAID = "spec.roles.reward: the API server refuses the pod: cannot unmarshal"


def test_a_job_without_pod_settings_needs_no_dry_run() -> None:
    assert running().num_trials == 0


def test_settings_for_all_pods_are_tried_with_one_pod() -> None:
    plan = World(job_body(podTemplate={"spec": {"tolerations": []}})).reconcile()
    assert [pod["metadata"]["name"] for pod in plan.trial] == ["sums-prepare-0"]


def test_pods_are_tried_by_dry_run_and_then_created() -> None:
    world = World(job_body(**ODD))
    plan = world.reconcile()
    assert [pod["metadata"]["name"] for pod in plan.trial] == ["sums-prepare-0", "sums-reward-0"]
    assert plan.create == ()
    world.to_running()
    assert world.num_trials == 1


def test_a_failed_dry_run_is_a_bad_config_until_the_job_is_edited() -> None:
    world = World(job_body(**ODD), words={"reward": SAID})
    world.settle()
    assert (world.phase, world.healthy()[1:], world.pods) == ("Failed", ("BadConfig", SAID), {})
    world.trial = None  # another replica takes over: it asks, and changes nothing
    before = dict(world.status)
    world.settle()
    assert (world.status, world.num_trials) == (before, 2)
    world.words.clear()
    world.edit(roles={})
    world.to_running()


def test_an_edited_suspended_job_is_tried_and_resumes_once_it_is_right() -> None:
    world = running()
    world.edit(suspend=True).wind_down()
    world.words["reward"] = SAID
    world.edit(**ODD).settle()
    assert world.healthy()[1:] == ("BadConfig", SAID)
    world.edit(suspend=False).settle()
    assert (world.pods, world.healthy()[1]) == ({}, "BadConfig")
    world.words.clear()
    world.edit(roles={"reward": {"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}}}).settle()
    assert list(world.pods) == [names.pod_name("sums", names.PREPARE, 0)]


def test_a_restart_is_tried_in_the_reconcile_that_sees_the_last_pod_gone() -> None:
    """No later event would cause another look."""
    world = running(roles={"reward": {"resources": {"limits": {"cpu": 1}}}})
    world.edit(restart={"id": "again"})
    plan = world.settle()
    while world.pods:
        world.end_those_asked()
        plan = world.reconcile()
    assert [pod["metadata"]["name"] for pod in plan.trial] == ["sums-reward-0"]
    world.to_running()
    assert world.status["run"]["number"] == 2


def test_a_dry_run_reports_refusals_of_the_first_pod_that_would_recur() -> None:
    pods = [{"metadata": {"name": role, "labels": {names.ROLE: role}}} for role in (names.PREPARE, "reward")]

    def told(code: int, message: str) -> list[str]:
        answer = ApiResponse(code, {"message": message, "reason": "AlreadyExists" if code == 409 else ""})
        return [name for name, _ in trial.refusals(pods, [answer, answer])]

    assert told(500, 'failed calling webhook "a": context deadline exceeded') == [names.PREPARE]
    assert told(403, "exceeded quota: a") == [names.PREPARE]
    assert told(400, 'admission webhook "a" does not support dry run') == []
    assert told(409, "already exists") == []
    assert told(201, "") == []


def test_the_problem_names_the_field_of_the_job_that_broke_the_pod() -> None:
    told = 'Pod in version "v1" cannot be handled as a Pod: '
    wrong = told + "json: cannot unmarshal string into Go struct field PodSpec.spec.tolerations of type []v1.Toleration"
    for body, where in (
        (job_body(podTemplate={"spec": {"tolerations": "all"}}), "spec.podTemplate"),
        (job_body(roles={"prepare": {"podTemplate": {"spec": {}}}}), "spec.roles.prepare"),
    ):
        tried = World(body).reconcile().trial
        said = trial.problem_of(view_of(body).job, tried, [ApiResponse(400, {"message": wrong})])
        problem = "spec.tolerations must be a list of Toleration, not a string"
        assert said == f"{where}: the API server refuses the pod: {problem}"

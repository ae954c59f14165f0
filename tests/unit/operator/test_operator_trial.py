"""Trial creation of pods, once for each user input before the first pod."""

from operator_world import World, job_body, running, view_of

from rlhfspec.cluster import names
from rlhfspec.cluster.api import ApiResponse
from rlhfspec.operator.making import trial

ODD = {
    "roles": {
        "reward": {"podTemplate": {"spec": {"nodeSelector": [1]}}},
        "prepare": {"resources": {"limits": {"a": 1}}},
    }
}
SAID = "spec.roles.reward: no pod can be made of it: cannot unmarshal"


def test_nothing_is_asked_of_a_job_that_says_nothing_of_pods() -> None:
    assert running().num_trials == 0


def test_what_is_written_for_all_pods_is_tried_by_one() -> None:
    plan = World(job_body(podTemplate={"spec": {"tolerations": []}})).reconcile()
    assert [pod["metadata"]["name"] for pod in plan.trial] == ["sums-prepare-0"]


def test_pods_are_tried_and_then_made() -> None:
    world = World(job_body(**ODD))
    plan = world.reconcile()
    assert [pod["metadata"]["name"] for pod in plan.trial] == ["sums-prepare-0", "sums-reward-0"]
    assert plan.create == ()
    world.to_running()
    assert world.num_trials == 1


def test_what_no_pod_can_be_made_of_is_a_bad_config_until_it_is_mended() -> None:
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


def test_a_suspended_job_is_tried_when_it_is_edited_and_goes_on_when_it_is_right() -> None:
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


def test_a_job_that_begins_anew_is_tried_by_the_look_that_finds_its_last_pod_gone() -> None:
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


def test_a_pod_that_is_refused_in_its_trial_is_refused_at_once_if_it_is_the_first_and_would_be_again() -> None:
    pods = [{"metadata": {"name": role, "labels": {names.ROLE: role}}} for role in (names.PREPARE, "reward")]

    def told(code: int, message: str) -> list[str]:
        answer = ApiResponse(code, {"message": message, "reason": "AlreadyExists" if code == 409 else ""})
        return [name for name, _ in trial.refusals(pods, [answer, answer])]

    assert told(500, 'failed calling webhook "a": context deadline exceeded') == [names.PREPARE]
    assert told(403, "exceeded quota: a") == [names.PREPARE]
    assert told(400, 'admission webhook "a" does not support dry run') == []
    assert told(409, "already exists") == []
    assert told(201, "") == []


def test_the_problem_names_what_the_user_wrote_in_words_of_the_job() -> None:
    told = 'Pod in version "v1" cannot be handled as a Pod: '
    wrong = told + "json: cannot unmarshal string into Go struct field PodSpec.spec.tolerations of type []v1.Toleration"
    for body, where in (
        (job_body(podTemplate={"spec": {"tolerations": "all"}}), "spec.podTemplate"),
        (job_body(roles={"prepare": {"podTemplate": {"spec": {}}}}), "spec.roles.prepare"),
    ):
        tried = World(body).reconcile().trial
        said = trial.problem_of(view_of(body).job, tried, [ApiResponse(400, {"message": wrong})])
        assert said == f"{where}: no pod can be made of it: spec.tolerations must be a list of Toleration, not a string"

"""Late, repeated and lost watch events do no harm."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from operator_objects import job, pod
from operator_world import job_body, spec_of

from rlhfspec.cluster import names
from rlhfspec.operator.deciding.memory import text_of
from rlhfspec.operator.deciding.observed import DryRunResult, Refusal
from rlhfspec.operator.looking.cache import Cache

KEY = ("team", "sums")


def warning(name: str, message: str, uid: str = "p1") -> dict[str, Any]:
    metadata = {"name": name, "namespace": "team"}
    return {"metadata": metadata, "involvedObject": {"uid": uid}, "reason": "Failed", "message": message}


def cache_of_a_job(**clock: Any) -> Cache:
    cache = Cache(**clock)
    cache.put_job(job())
    return cache


def phases(cache: Cache) -> list[tuple[str, str]]:
    return [(pod.uid, pod.phase) for pod in cache.pods(KEY)]


def test_older_versions_of_pods_and_jobs_are_ignored() -> None:
    cache = cache_of_a_job()
    assert cache.put_pod(pod(version=5, phase="Running")) == KEY
    assert cache.put_pod(pod(version=4, phase="Pending")) is None
    assert phases(cache) == [("p1", "Running")]
    assert cache.put_job(job(version=9)) == KEY
    assert cache.put_job(job(version=9)) is None


def test_a_job_is_parsed_again_only_when_its_user_changed_it() -> None:
    cache, body = Cache(), {**job_body(), "status": {}}
    key = ("rl", "sums")

    def read_after(version: int, **changes: Any) -> object:
        cache.put_job({**body, **changes, "metadata": body["metadata"] | {"resourceVersion": str(version)}})
        return cache.job(key).job

    first = read_after(1)
    assert first is not None
    assert read_after(2, status={"phase": "Running"}) is first
    other = read_after(3, spec=spec_of(training={"steps": 11}))
    assert other is not first
    assert read_after(4, spec=spec_of(no_such="field")) is None
    assert read_after(5, spec=spec_of(training={"steps": 11})) == other


def test_a_deleted_pod_does_not_come_back_with_an_older_version() -> None:
    """It does with a later version: the API server reports one whose labels changed as deleted."""
    cache = cache_of_a_job()
    cache.put_pod(pod(version=5))
    assert cache.remove_pod(pod(version=7)) == KEY
    assert [cache.put_pod(pod(version=version)) for version in (6, 7)] == [None, None]
    assert phases(cache) == []
    cache.put_pod(pod("p2", version=8))
    assert phases(cache) == [("p2", "Pending")]
    cache.remove_pod(pod("p2", version=9))
    assert cache.put_pod(pod(version=10)) == KEY
    assert phases(cache) == [("p1", "Pending")]


def test_a_new_pod_of_the_same_name_inherits_no_warnings() -> None:
    cache = cache_of_a_job()
    cache.put_pod(pod())
    assert cache.put_warning(warning("e1", "no such image")) == KEY
    cache.put_pod(pod("p2", version=2))
    assert cache.pods(KEY)[0].warnings == ()
    assert cache.put_warning(warning("e1", "again")) is None
    assert cache.remove_pod(pod()) is None
    assert phases(cache) == [("p2", "Pending")]


def test_a_warning_of_another_namespace_is_ignored() -> None:
    """Users who may write events there may write any uid."""
    cache, foreign = cache_of_a_job(), warning("e1", "no such image")
    cache.put_pod(pod())
    foreign["metadata"]["namespace"] = "hostile"
    assert cache.put_warning(foreign) is None
    assert cache.pods(KEY)[0].warnings == ()


def test_a_repeated_warning_is_kept_once() -> None:
    cache = cache_of_a_job()
    cache.put_pod(pod())
    for message in ("try 1", "try 2", "try 2"):
        cache.put_warning(warning("e1", message))
    assert [said.message for said in cache.pods(KEY)[0].warnings] == ["try 2"]


def test_a_list_removes_only_pods_that_existed_before_it_began() -> None:
    cache = cache_of_a_job()
    for number in range(3):
        cache.put_pod(pod(f"p{number}", worker=number))
    before = cache.uids("pod", "team")
    cache.put_pod(pod("p9", worker=9))  # while the list was under way
    assert cache.listed("pod", before, ["p1"]) == [KEY, KEY]
    assert [uid for uid, _ in phases(cache)] == ["p1", "p9"]


def test_a_recreated_job_inherits_no_state() -> None:
    cache = Cache()
    cache.put_job(job())
    cache.tried(KEY, DryRunResult(1, "no"))
    assert cache.observed(KEY).trial == DryRunResult(1, "no")
    cache.put_job(job("j2", version=2))
    assert cache.observed(KEY).trial is None
    assert cache.remove_job(job()) is None
    assert cache.job(KEY) is not None


@pytest.mark.parametrize(
    "owners",
    [
        [],
        [{"kind": "RLHFJob", "name": "sums", "uid": "j0", "controller": True}],
        [{"kind": "RLHFJob", "name": "sums", "uid": "j1"}],
        [{"kind": "Job", "name": "sums", "uid": "j1", "controller": True}],
        [{"kind": "RLHFJob", "name": "other", "uid": "j2", "controller": True}],
    ],
)
def test_a_pod_that_no_job_owns_is_ignored_and_leaves_its_former_job(owners: list[dict[str, Any]]) -> None:
    """Labels make no difference, nor an older job of the name; such a pod cannot report either."""
    for known in ([], [pod()]):
        cache, other = cache_of_a_job(), pod(version=2)
        other["metadata"]["ownerReferences"] = owners
        for each in known:
            cache.put_pod(each)
        assert cache.put_pod(other) == KEY or not known
        assert phases(cache) == []


@pytest.mark.parametrize("skew", [-3600, 0, 46, 3600])
def test_the_grace_of_a_pod_is_measured_by_the_clock_of_the_operator(skew: float) -> None:
    """The API server's clock may be wrong; a second, shorter grace counts from the first mark."""
    now = 100.0
    cache = cache_of_a_job(now=lambda: now)

    def marked(grace: float, version: int) -> dict[str, Any]:
        body = pod(version=version)
        at = datetime.now(UTC) + timedelta(seconds=skew + grace)
        body["metadata"] |= {"deletionTimestamp": text_of(at), "deletionGracePeriodSeconds": grace}
        return body

    def left() -> float:
        [found] = cache.pods(KEY)
        return (found.gone_by - datetime.now(UTC)).total_seconds()

    cache.put_pod(marked(30, 2))
    assert left() == pytest.approx(30, abs=1)
    now += 20.0
    assert left() == pytest.approx(10, abs=1)
    cache.put_pod(marked(5, 3))
    assert left() == pytest.approx(-15, abs=1)


def test_the_owner_and_the_name_of_a_pod_identify_its_worker_not_labels() -> None:
    """Users who may write pods may write labels."""
    cache, relabelled = cache_of_a_job(), pod(version=2)
    relabelled["metadata"]["labels"] = {names.ROLE: "trainer", names.WORKER: "7", names.JOB: "other"}
    cache.put_pod(relabelled)
    assert [found.key for found in cache.pods(KEY)] == [("reward", 0)]
    shell = pod("p2")
    shell["metadata"]["name"] = "sums-shell"
    assert cache.put_pod(shell) is None


def test_a_refusal_is_forgotten_once_the_pod_in_the_way_is_gone() -> None:
    cache, older = cache_of_a_job(), pod()
    older["metadata"]["ownerReferences"][0]["uid"] = "j0"
    older["metadata"] |= {"deletionTimestamp": "2026-01-01T00:01:00Z"}
    cache.put_pod(older)
    name = older["metadata"]["name"]
    assert cache.is_leaving(KEY, name)
    cache.refused(KEY, Refusal("Pod", name, "Leaving", "", datetime.now(UTC)))
    cache.remove_pod(older)
    assert cache.observed(KEY).refusals == ()
    assert not cache.is_leaving(KEY, name)


def test_a_job_managed_by_another_controller_is_ignored() -> None:
    cache, theirs = Cache(), job()
    theirs["spec"] = {"managedBy": "kueue.x-k8s.io/multikueue"}
    assert (cache.put_job(theirs), cache.jobs()) == (None, [])
    theirs["spec"] = {"managedBy": "rlhfspec.io/operator"}
    assert (cache.put_job(theirs), cache.jobs()) == (KEY, [KEY])

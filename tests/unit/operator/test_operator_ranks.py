"""Pods of a trainer on several nodes find each other and restart together."""

from typing import Any

from operator_world import SETTINGS, World, job_body, running

from rlhfspec.cluster import names

TWO = {"trainer": {"nodes": 2, "ranksPerNode": 4}}
FIRST, SECOND = "sums-trainer-0", "sums-trainer-1"
KILLED = "killed by SIGKILL (rank 6 of 8 on node 1)"


def trainers(world: World) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in world.pods.items() if "-trainer-" in name}


def again(world: World) -> None:
    world.wind_down()
    world.pass_time(40.0).wind_down()


def test_a_node_gets_its_number_and_the_address_of_the_first_node() -> None:
    world = running(roles=TWO)
    for node, name in enumerate((FIRST, SECOND)):
        spec = world.pods[name]["spec"]
        assert (spec["hostname"], spec["subdomain"]) == (name, "ranks-sums-6f1c-42")
        assert spec["containers"][0]["command"] == [
            "python", "-m", "rlhfspec.worker.ranks", "--nodes", "2", "--ranks-per-node", "4", "--node", str(node),
            "--leader", f"{FIRST}.ranks-sums-6f1c-42:29500", "--secret", "/etc/rlhfspec-credentials/ranks.secret",
            "-m", "rlhfspec.trainer",
            "--connections", "/etc/rlhfspec/connections.json", "--worker", "0",
        ]  # fmt: skip
    service = world.objects["Service", "ranks-sums-6f1c-42"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    labels = world.pods[SECOND]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["metadata"]["ownerReferences"] == world.pods[FIRST]["metadata"]["ownerReferences"]


def opened(is_on: bool = True, **roles: Any) -> set[str]:
    world = running(SETTINGS.model_copy(update={"network_policies": is_on}), roles=roles)
    made = {name: policy for (kind, name), policy in world.objects.items() if kind == "NetworkPolicy"}
    for policy in made.values():
        peers = policy["spec"]["podSelector"]
        assert peers["matchLabels"] == {names.MANAGED_BY: names.FIELD_MANAGER, names.JOB: "sums"}
        assert [policy["spec"][way][0][of] for way, of in (("ingress", "from"), ("egress", "to"))] == [
            [{"podSelector": peers}], [{"podSelector": peers}],
        ]  # fmt: skip
    return {name.removesuffix("-sums-6f1c-42") for name in made}


def test_network_ports_open_only_for_jobs_that_need_them() -> None:
    gpu = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    assert opened() == opened(generator=gpu) == opened(trainer=gpu) == set()
    assert opened(generator={"weights": "group"}) == {"weights"}
    assert opened(generator=gpu, trainer=gpu) == {"weights"}, "auto, on GPUs"
    assert opened(generator={"workers": 2}) == opened(generator={"replicas": {"min": 1, "max": 2}}) == {"moves"}
    assert opened(**TWO) == {"ranks"}
    assert opened(is_on=False, **TWO) == set(), "policies that allow some deny the rest"
    assert opened(generator=gpu | {"weights": "store"}, trainer=gpu) == set()


def test_only_the_first_node_has_probes_and_ports() -> None:
    world = running(roles=TWO)
    first, second = (world.pods[name]["spec"]["containers"][0] for name in (FIRST, SECOND))
    assert "readinessProbe" in first
    assert not {"readinessProbe", "livenessProbe", "startupProbe", "ports"} & second.keys()


def test_one_node_needs_no_service() -> None:
    world = running(roles={"trainer": {"ranksPerNode": 2}})
    assert not [name for kind, name in world.objects if kind == "Service"]
    assert "subdomain" not in world.pods[FIRST]["spec"]


def test_the_pod_group_includes_all_nodes_of_the_trainer() -> None:
    world = running(roles=TWO, scheduling={"gang": "volcano"})
    [group] = [each for (kind, _), each in world.objects.items() if kind == "PodGroup"]
    assert group["spec"]["minMember"] == len([name for name in world.pods if "prepare" not in name])
    assert all("scheduling.k8s.io/group-name" in world.pods[n]["metadata"]["annotations"] for n in (FIRST, SECOND))


def test_a_killed_rank_restarts_its_set_and_no_other_worker() -> None:
    world = running(roles=TWO)
    before, others = trainers(world), {name for name in world.pods if "-trainer-" not in name}
    world.end_pod(SECOND, 137, KILLED).settle()
    assert world.healthy()[0] == "False"
    assert KILLED in world.healthy()[2], "the condition names the rank"
    assert [(delete.name, delete.grace_seconds) for delete in world.deletes] == [(FIRST, 2)], "it may hang for ever"
    assert world.made == [], "not beside one of the earlier set"
    again(world)
    assert sorted(world.made) == [FIRST, SECOND]
    assert trainers(world).keys() == before.keys()
    assert not set(trainers(world).values()) & set(before.values())
    assert others == {name for name in world.pods if "-trainer-" not in name}
    assert world.status["restarts"] == {"total": 1, "counted": 0, "byWorker": {"trainer-1": 1}}
    world.run_all().settle()
    assert world.phase == "Running"


def test_ranks_that_end_with_a_killed_one_do_not_count_as_restarts() -> None:
    world = running(roles=TWO)
    world.end_pod(FIRST, 1, "Connection closed by peer (rank 0 of 8 on node 0)")
    world.end_pod(SECOND, 137, KILLED).settle()
    assert KILLED in world.healthy()[2]
    again(world)
    assert sorted(world.made) == [FIRST, SECOND]
    assert world.status["restarts"] == {"total": 1, "counted": 0, "byWorker": {"trainer-1": 1}}


def test_a_set_of_ranks_restarts_only_after_every_old_pod_is_gone() -> None:
    world = running(roles=TWO)
    world.lost_nodes.add("far")
    world.pods[FIRST]["spec"]["nodeName"] = "far"
    world.end_pod(SECOND, 137, KILLED)
    for _ in range(3):
        world.settle()
        world.end_those_asked()
        world.pass_time(10.0)
    assert FIRST in world.pods, "its node does not answer"
    assert world.made == []


def test_a_released_rank_is_not_restarted_while_the_first_node_finishes() -> None:
    world = running(roles=TWO)
    world.end_pod(SECOND, 0, "left: rank 0 released its ranks")
    world.pass_time(5.0).settle()
    assert (world.deletes, world.made) == ([], []), "the first still writes the export"
    world.end_pod(FIRST, 0, "completed: step 10").settle()
    assert world.phase == "Succeeded"


def test_two_nodes_need_a_folder_that_both_see() -> None:
    world = World(job_body(roles=TWO, storage={"uri": "s3://bucket/team"}))
    world.settle()
    assert (world.phase, world.healthy()[1], world.pods) == ("Failed", "BadConfig", {})
    assert world.healthy()[2].startswith("spec.roles.trainer.nodes: 2: several nodes need a storage.claim")


def test_pod_names_fit_the_limit_for_the_longest_job_name() -> None:
    longest = "a" * 52
    assert len(names.pod_name(longest, "trainer", 63)) <= 63
    assert len(names.ranks_name(longest, "12345678-9")) <= 63

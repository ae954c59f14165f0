"""A trainer of several nodes: pods that find each other, and begin again together."""

from __future__ import annotations

from typing import Any

from operator_world import World, job_body

from rlhfspec.cluster import names

TWO = {"trainer": {"nodes": 2, "ranksPerNode": 4}}
FIRST, SECOND = "sums-trainer-0", "sums-trainer-1"
KILLED = "killed by SIGKILL (rank 6 of 8 on node 1)"


def running(**roles: Any) -> World:
    world = World(job_body(roles=TWO | roles))
    world.to_running()
    assert world.phase == "Running"
    world.made.clear()
    return world


def trainers(world: World) -> dict[str, str]:
    """Uids of its pods, by name."""
    return {name: pod["metadata"]["uid"] for name, pod in world.pods.items() if "-trainer-" in name}


def again(world: World) -> None:
    """Nodes do what they were asked to, and the delay before a restart passes."""
    for _ in range(4):
        world.settle()
        world.end_those_asked()
        world.pass_time(40.0)
    world.settle()


def test_a_node_is_told_which_it_is_and_where_the_first_is() -> None:
    world = running()
    for node, name in enumerate((FIRST, SECOND)):
        spec = world.pods[name]["spec"]
        assert (spec["hostname"], spec["subdomain"]) == (name, "ranks-sums-6f1c-42")
        assert spec["containers"][0]["command"] == [
            "python", "-m", "rlhfspec.worker.ranks", "--nodes", "2", "--ranks-per-node", "4", "--node", str(node),
            "--leader", f"{FIRST}.ranks-sums-6f1c-42:29500", "-m", "rlhfspec.trainer",
            "--connections", "/etc/rlhfspec/connections.json", "--worker", "0",
        ]  # fmt: skip
    service = world.objects["Service", "ranks-sums-6f1c-42"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    labels = world.pods[SECOND]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["metadata"]["ownerReferences"] == world.pods[FIRST]["metadata"]["ownerReferences"]


def labelled(**roles: Any) -> set[str]:
    """Roles whose pods have the label of those among which weights go by a group."""
    world = World(job_body(roles=roles))
    world.to_running()
    pods = [pod["metadata"]["labels"] for pod in world.pods.values() if names.WEIGHTS in pod["metadata"]["labels"]]
    return {labels[names.ROLE] for labels in pods if labels[names.WEIGHTS] == "group"}


def test_ports_are_open_between_trainer_and_generators_where_weights_go_by_a_group() -> None:
    gpu, members = {"resources": {"limits": {"nvidia.com/gpu": 1}}}, {"trainer", "generator"}
    assert labelled(generator={"weights": "group"}) == members
    assert labelled(generator=gpu, trainer=gpu) == members, "auto, on GPUs"
    assert labelled(generator=gpu) == labelled(trainer=gpu) == labelled() == set()
    assert labelled(generator=gpu | {"weights": "store"}, trainer=gpu) == set()


def test_only_the_first_node_answers_and_is_asked() -> None:
    world = running()
    first, second = (world.pods[name]["spec"]["containers"][0] for name in (FIRST, SECOND))
    assert "readinessProbe" in first
    assert not {"readinessProbe", "livenessProbe", "startupProbe", "ports"} & second.keys()


def test_one_node_needs_no_service() -> None:
    world = World(job_body(roles={"trainer": {"ranksPerNode": 2}}))
    world.to_running()
    assert not [name for kind, name in world.objects if kind == "Service"]
    assert "subdomain" not in world.pods[FIRST]["spec"]


def test_all_nodes_are_of_the_group_that_starts_together() -> None:
    world = World(job_body(roles=TWO, scheduling={"gang": "volcano"}))
    world.to_running()
    [group] = [each for (kind, _), each in world.objects.items() if kind == "PodGroup"]
    assert group["spec"]["minMember"] == len([name for name in world.pods if "prepare" not in name])
    assert all("scheduling.k8s.io/group-name" in world.pods[n]["metadata"]["annotations"] for n in (FIRST, SECOND))


def test_when_a_rank_is_killed_the_set_begins_again_and_nothing_else() -> None:
    world = running()
    before, others = trainers(world), {name for name in world.pods if "-trainer-" not in name}
    world.end_pod(SECOND, 137, KILLED)
    world.settle()
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
    world.run_all()
    world.settle()
    assert world.phase == "Running"


def test_what_the_others_end_of_is_not_counted_whichever_is_seen_first() -> None:
    world = running()
    world.end_pod(FIRST, 1, "Connection closed by peer (rank 0 of 8 on node 0)")
    world.end_pod(SECOND, 137, KILLED)
    world.settle()
    assert KILLED in world.healthy()[2]
    again(world)
    assert sorted(world.made) == [FIRST, SECOND]
    assert world.status["restarts"] == {"total": 1, "counted": 0, "byWorker": {"trainer-1": 1}}


def test_a_set_waits_until_every_pod_of_the_earlier_one_is_gone() -> None:
    world = running()
    world.lost_nodes.add("far")
    world.pods[FIRST]["spec"]["nodeName"] = "far"
    world.end_pod(SECOND, 137, KILLED)
    for _ in range(3):
        world.settle()
        world.end_those_asked()
        world.pass_time(10.0)
    assert FIRST in world.pods, "its node does not answer"
    assert world.made == []


def test_ranks_that_were_let_go_are_waited_with_until_the_first_node_is_done() -> None:
    world = running()
    world.end_pod(SECOND, 0, "left: rank 0 let its ranks go")
    world.pass_time(5.0)
    world.settle()
    assert (world.deletes, world.made) == ([], []), "the first still writes the export"
    world.end_pod(FIRST, 0, "completed: step 10")
    world.settle()
    assert world.phase == "Succeeded"


def test_two_nodes_need_a_folder_that_both_see() -> None:
    world = World(job_body(roles=TWO, storage={"uri": "s3://bucket/team"}))
    world.settle()
    assert (world.phase, world.healthy()[1], world.pods) == ("Failed", "BadConfig", {})
    assert world.healthy()[2].startswith("spec.roles.trainer.nodes: 2: ranks write checkpoints into one folder")


def test_names_fit_for_the_longest_job() -> None:
    longest = "a" * 52
    assert len(names.pod_name(longest, "trainer", 63)) <= 63
    assert len(names.ranks_name(longest, "12345678-9")) <= 63

"""The operator's objects: pods that a restricted namespace admits, and their mounts."""

import base64
import json
from typing import Any

import pytest
from operator_world import SETTINGS, World, job_body, running

from rlhfspec.cluster import names
from rlhfspec.messages.access.connections import Connections
from rlhfspec.operator.allowed_fields import Allowed
from rlhfspec.operator.making.pods import LONG_GRACE_SECONDS, merged

Json = dict[str, Any]
GPU = {"limits": {"nvidia.com/gpu": 2}}
THREADS = {"name": "OMP_NUM_THREADS"}


def objects_of(settings: Any = SETTINGS, **spec: Any) -> dict[tuple[str, str], Json]:
    world = World(job_body(**spec), settings, labelled={"c", "keys"})
    world.to_running()
    return world.objects | {("Pod", name): pod for name, pod in world.pods.items()}


def pod_of(role: str, worker: int = 0, **spec: Any) -> Json:
    return objects_of(**spec)["Pod", names.pod_name("sums", role, worker)]


def container_of(role: str, **spec: Any) -> Json:
    return pod_of(role, **spec)["spec"]["containers"][0]  # type: ignore[no-any-return]


ROLES = ("prepare", "control", "prompts", "generator", "reward", "trainer")


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_is_what_restricted_namespaces_admit(role: str) -> None:
    pod = pod_of(role)
    security = pod["spec"]["securityContext"]
    assert security["runAsNonRoot"]
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    own = pod["spec"]["containers"][0]["securityContext"]
    assert own == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_mounts_its_own_credentials_and_no_others(role: str) -> None:
    pod = pod_of(role)
    secrets = [volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if "secret" in volume]
    assert secrets == [f"sums-{role}-6f1c-42"]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
    assert {"/etc/rlhfspec", "/etc/rlhfspec-credentials", "/storage", "/tmp", "/dev/shm"} <= set(mounts)
    assert ("/var/run/secrets/rlhfspec" in mounts) == (role == "control"), "only control has a token"
    assert set(mounts.values()) == {volume["name"] for volume in pod["spec"]["volumes"]}


WHOLE, OWN = "/storage", {"mountPath": "/storage/runs/sums-6f1c-42", "subPath": "runs/sums-6f1c-42"}
READABLE = [{"mountPath": WHOLE, "readOnly": True}]
WALLED = [*READABLE, OWN]


def storage_mounts(container: Json) -> list[Json]:
    mounts = [mount for mount in container["volumeMounts"] if mount["name"] == "storage"]
    return [{name: value for name, value in mount.items() if name != "name"} for mount in mounts]


@pytest.mark.parametrize(
    ("role", "spec", "mounts"),
    [
        ("prepare", {}, [{"mountPath": WHOLE}]),
        *((role, {}, WALLED) for role in ROLES if role != "prepare"),
        *((role, {"observability": {"traces": False}}, WALLED) for role in ("control", "generator", "trainer")),
        *((role, {"observability": {"traces": False}}, READABLE) for role in ("prompts", "reward")),
        ("reward", {"storage": {"runFolder": "./a//b/"}}, [*READABLE, {"mountPath": "/storage/a/b", "subPath": "a/b"}]),
        *((role, {"storage": {"uri": "s3://bucket/team"}}, [{"mountPath": WHOLE}]) for role in ("prepare", "reward")),
    ],
)  # fmt: skip
def test_a_role_mounts_only_the_parts_of_the_claim_that_it_needs(role: str, spec: Json, mounts: list[Json]) -> None:
    container = container_of(role, **spec)
    assert storage_mounts(container) == mounts
    writes_all = mounts == [{"mountPath": WHOLE}]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    assert environment["HF_HOME"] == ("/storage/cache/huggingface" if writes_all else "/tmp/huggingface")
    assert environment["RLHFSPEC_CACHE"] == "/storage/cache"
    assert environment["RLHFSPEC_KEPT"].endswith("/.kept")
    assert writes_all or environment["RLHFSPEC_KEPT"].startswith(f"{mounts[-1]['mountPath']}/")


def test_claims_that_a_job_mounts_itself_are_read_only() -> None:
    """The job's own claim under another name would have no walls."""
    mount = {"name": "v", "mountPath": "/v"}
    template = {
        "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}, {"name": "scratch", "emptyDir": {}}],
        "containers": [{"name": "worker", "volumeMounts": [mount, {"name": "scratch", "mountPath": "/scratch"}]}],
        "initContainers": [{"name": "side", "image": "mine", "volumeMounts": [{**mount, "readOnly": False}]}],
    }
    reward = {"reward": {"podTemplate": {"spec": template}}}
    spec = pod_of("reward", storage={"claim": "c"}, roles=reward)["spec"]
    assert spec["initContainers"][0]["volumeMounts"] == [{**mount, "readOnly": True}]
    assert {**mount, "readOnly": True} in spec["containers"][0]["volumeMounts"]
    assert {"name": "scratch", "mountPath": "/scratch"} in spec["containers"][0]["volumeMounts"]
    assert storage_mounts(spec["containers"][0]) == WALLED
    stored = {"volumes": [{"name": "storage", "persistentVolumeClaim": {"claimName": "c"}}]}
    container = container_of("reward", storage={"uri": "s3://a/b"}, roles={"reward": {"podTemplate": {"spec": stored}}})
    assert storage_mounts(container) == READABLE


def test_claims_in_the_template_of_the_chart_are_mounted_as_written() -> None:
    mount = {"name": "datasets", "mountPath": "/datasets"}
    nfs = {"name": "storage", "persistentVolumeClaim": {"claimName": "another"}}
    template = {
        "volumes": [{"name": "datasets", "persistentVolumeClaim": {"claimName": "datasets"}}, nfs],
        "containers": [{"name": "worker", "volumeMounts": [mount]}],
    }
    pod = objects_of(SETTINGS.model_copy(update={"pod_template": {"spec": template}}))["Pod", "sums-reward-0"]
    assert nfs in pod["spec"]["volumes"]
    assert mount in pod["spec"]["containers"][0]["volumeMounts"]
    assert storage_mounts(pod["spec"]["containers"][0]) == WALLED


def test_the_token_of_control_has_the_operator_as_audience() -> None:
    (volume,) = (volume for volume in pod_of("control")["spec"]["volumes"] if volume["name"] == "token")
    assert volume["projected"]["sources"][0]["serviceAccountToken"]["audience"] == names.AUDIENCE


def test_every_object_is_owned_by_the_job_and_labelled() -> None:
    for (kind, name), thing in objects_of().items():
        (owner,) = thing["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == ("RLHFJob", "sums", "6f1c-42", True)
        assert thing["metadata"]["labels"][names.JOB] == "sums", (kind, name)


def test_the_config_map_holds_the_connections_and_the_job() -> None:
    data = objects_of()["ConfigMap", "sums-connections-6f1c-42"]["data"]
    connections = json.loads(data["connections.json"])
    assert connections["folder"] == "/storage/runs/sums-6f1c-42"
    assert connections["job_file"] == "/storage/runs/sums-6f1c-42/processes/job.json"
    assert connections["report_url"] == "https://operator.rlhfspec.svc:8443/v1/namespaces/rl/jobs/sums/report"
    assert connections["uid"] == names.run_uid("6f1c-42", 1)
    assert "storage_uri" not in connections, "pods of an earlier version know no such field"
    assert Connections.model_validate(connections).folder_is_kept_by == "trainer", "no field is unknown to a process"
    job = json.loads(data["job.json"])
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    assert job["metadata"] == {"name": "sums", "namespace": "rl"}
    own = objects_of(storage={"runFolder": "mine/first", "claim": "c"})["ConfigMap", "sums-connections-6f1c-42"]
    assert json.loads(own["data"]["connections.json"])["folder"] == "/storage/mine/first"


def test_pods_of_a_job_in_an_object_store_have_a_folder_and_the_credentials_of_its_secret() -> None:
    objects = objects_of(storage={"uri": "s3://bucket/team", "secret": "keys", "runFolder": "mine/first"})
    told = Connections.model_validate_json(objects["ConfigMap", "sums-connections-6f1c-42"]["data"]["connections.json"])
    assert told.storage_uri == "s3://bucket/team"
    assert str(told.folder) == "/storage/mine/first"
    for name in ("sums-prompts-0", "sums-trainer-0"):
        spec = objects["Pod", name]["spec"]
        assert {"name": "storage", "emptyDir": {}} in spec["volumes"]
        [container] = spec["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
        probe = container["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] == 4 * 3600, "models are fetched first"
    assert "envFrom" not in objects_of()["Pod", "sums-trainer-0"]["spec"]["containers"][0]


def test_secrets_hold_the_keys_of_the_settings_and_are_deterministic() -> None:
    secret = objects_of()["Secret", "sums-reward-6f1c-42"]
    run = names.run_uid("6f1c-42", 1)
    assert base64.b64decode(secret["data"]["reward.key"]).decode() == f"sums 6f1c-42 {run} reward 2026"
    assert objects_of() == objects_of()


@pytest.mark.parametrize(
    ("role", "spec", "image"),
    [
        ("control", {}, "rlhfspec:slim"),
        ("prompts", {}, "rlhfspec:slim"),
        ("generator", {}, "rlhfspec:cpu"),
        ("generator", {"roles": {"generator": {"resources": GPU}}}, "rlhfspec:cuda"),
        ("reward", {"roles": {"generator": {"resources": GPU}}}, "rlhfspec:cpu"),
        ("reward", {"roles": {"reward": {"image": "mine:1"}}}, "mine:1"),
    ],
)
def test_a_role_gets_the_image_that_it_needs(role: str, spec: Json, image: str) -> None:
    assert container_of(role, **spec)["image"] == image


def test_containers_run_the_commands_of_a_run_on_a_laptop() -> None:
    worker = ["--connections", "/etc/rlhfspec/connections.json", "--worker", "0"]
    assert container_of("reward")["command"] == ["python", "-m", "rlhfspec.reward", *worker]
    ranks = container_of("trainer", roles={"trainer": {"ranksPerNode": 2}})["command"]
    assert ranks == [
        "python", "-m", "rlhfspec.worker.ranks", "--nodes", "1", "--ranks-per-node", "2", "-m", "rlhfspec.trainer",
        *worker,
    ]  # fmt: skip
    parts = container_of("generator", roles={"generator": {"tensorParallel": 2, "resources": {"limits": {"cpu": 8}}}})
    assert parts["command"] == ["python", "-m", "rlhfspec.generator", *worker], "it starts the others itself"
    assert {"name": "OMP_NUM_THREADS", "value": "4"} in parts["env"]
    assert container_of("prepare")["command"] == ["python", "-m", "rlhfspec.prepare", *worker[:2]]


def test_trainer_and_generator_get_a_long_grace_period() -> None:
    grace = {role: pod_of(role)["spec"]["terminationGracePeriodSeconds"] for role in ROLES}
    assert {role for role, seconds in grace.items() if seconds == LONG_GRACE_SECONDS} == {"trainer", "generator"}


def test_a_template_is_merged_by_name_and_cannot_hide_a_pod_from_the_operator() -> None:
    template = {
        "metadata": {"labels": {"team": "a", names.NAME: "mine"}, "annotations": {"note": "x"}},
        "spec": {
            "containers": [
                {"name": "worker", "env": [{"name": "OMP_NUM_THREADS", "value": "2"}, {"name": "HOME", "value": "/h"}]},
                {"name": "side", "image": "side:1"},
            ],
            "volumes": [{"name": "extra", "emptyDir": {}}],
            "nodeSelector": {"gpu": "yes"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        },
    }
    annotated = Allowed(fields=(*Allowed().fields, "metadata.annotations"))
    settings = SETTINGS.model_copy(update={"allowed": annotated})
    pod = objects_of(settings, roles={"reward": {"podTemplate": template}})["Pod", "sums-reward-0"]
    assert pod["metadata"]["labels"][names.NAME] == "rlhfspec"
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["annotations"]["note"] == "x"
    assert pod["spec"]["restartPolicy"] == "Never"
    worker, side = pod["spec"]["containers"]
    env = {variable["name"]: variable.get("value") for variable in worker["env"]}
    assert env["OMP_NUM_THREADS"] == "2"
    assert env["HOME"] == "/h"
    assert env["RLHFSPEC_RUN"] == names.run_uid("6f1c-42", 1)
    assert worker["image"] == "rlhfspec:cpu"
    assert side["image"] == "side:1"
    assert pod["spec"]["volumes"][-1] == {"name": "extra", "emptyDir": {}}
    assert len(pod["spec"]["tolerations"]) == 3
    assert pod["spec"]["nodeSelector"] == {"gpu": "yes"}


def test_merging_replaces_texts_and_removes_nulls() -> None:
    base = {"command": ["a", "b"], "x": {"y": 1, "z": 2}}
    assert merged(base, {"command": ["c"], "x": {"y": None}}) == {"command": ["c"], "x": {"z": 2}}
    assert base == {"command": ["a", "b"], "x": {"y": 1, "z": 2}}, "what is given stays as it is"


def test_pod_templates_merge_and_that_of_the_role_wins() -> None:
    def template(node: str, team: str) -> Json:
        spec = {"nodeSelector": {"pool": node}, "tolerations": [{"key": team, "operator": "Exists"}]}
        return {"metadata": {"labels": {"team": team}}, "spec": spec}

    cluster = SETTINGS.model_copy(update={"pod_template": template("any", "cluster")})
    own = {"trainer": {"podTemplate": template("fast", "role")}}
    things = objects_of(cluster, podTemplate=template("gpu", "job"), roles=own)
    pods = {name.rpartition("-")[0]: pod for (kind, name), pod in things.items() if kind == "Pod"}
    assert len(pods) == len(ROLES)
    for name, pod in pods.items():
        is_trainer = name == "sums-trainer"
        assert pod["spec"]["nodeSelector"] == {"pool": "fast" if is_trainer else "gpu"}
        assert pod["metadata"]["labels"]["team"] == ("role" if is_trainer else "job")
        tolerated = [each["key"] for each in pod["spec"]["tolerations"]][2:]
        assert tolerated == ["cluster", "job", *(["role"] if is_trainer else [])]
    plain = objects_of(cluster)["Pod", "sums-reward-0"]
    assert plain["spec"]["nodeSelector"] == {"pool": "any"}


def test_a_jobs_own_schedulers_win_over_the_clusters_template() -> None:
    """The job's own settings win over its gang's marks, and those over the cluster's template."""
    cluster = SETTINGS.model_copy(update={"pod_template": {"spec": {"schedulerName": "site"}}})
    assert objects_of(cluster)["Pod", "sums-reward-0"]["spec"]["schedulerName"] == "site"
    gang = {"gang": "volcano"}
    assert objects_of(cluster, scheduling=gang)["Pod", "sums-reward-0"]["spec"]["schedulerName"] == "volcano"
    own = objects_of(cluster, scheduling=gang, podTemplate={"spec": {"schedulerName": "mine"}})
    assert own["Pod", "sums-reward-0"]["spec"]["schedulerName"] == "mine"


def test_roles_have_priorities_until_the_job_names_one() -> None:
    classes = SETTINGS.model_copy(update={"priority_classes": {"trainer": "first", "generator": "second"}})

    def found(**spec: Any) -> dict[str, str | None]:
        things = objects_of(classes, **spec)
        return {role: things["Pod", f"sums-{role}-0"]["spec"].get("priorityClassName") for role in ROLES[3:]}

    assert found() == {"generator": "second", "reward": None, "trainer": "first"}
    assert found(scheduling={"priorityClass": "high"}) == dict.fromkeys(ROLES[3:], "high")
    own = {"trainer": {"podTemplate": {"spec": {"priorityClassName": "top"}}}}
    assert found(roles=own) == {"generator": "second", "reward": None, "trainer": "top"}


def test_pods_set_no_user_where_the_cluster_chooses_it() -> None:
    pod = objects_of(SETTINGS.model_copy(update={"chooses_user": False}))["Pod", "sums-reward-0"]
    assert pod["spec"]["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def in_worker(**resources: Any) -> Json:
    return {"podTemplate": {"spec": {"containers": [{"name": "worker", "resources": resources}]}}}


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"resources": {"limits": {"nvidia.com/mig-1g.10gb": 2}}}, 2),
        ({"resources": {"limits": {"amd.com/gpu": 1, "nvidia.com/gpu": "2"}}}, 3),
        (in_worker(limits={"nvidia.com/gpu": 4}), 4),
        ({"resources": {"limits": {"nvidia.com/gpu": 4}}} | in_worker(limits={"nvidia.com/gpu": 1}), 1),
        (in_worker(claims=[{"name": "a"}, {"name": "b"}]), 2),
        (in_worker(limits=[1], claims="all"), 0),
        ({"resources": {"limits": {"example.com/nic": 1, "nvidia.com/gpu": 0}}}, 0),
    ],
)
def test_gpus_of_any_resource_name_are_counted_and_select_the_image(options: Json, count: int) -> None:
    settings = SETTINGS.model_copy(update={"gpu_resources": ("nvidia.com/gpu", "nvidia.com/mig-*", "amd.com/gpu")})
    world = running(settings, roles={"trainer": options})
    assert world.status["gpus"] == count
    [worker] = world.pods["sums-trainer-0"]["spec"]["containers"]
    assert worker["image"] == ("rlhfspec:cuda" if count else "rlhfspec:cpu")


def test_a_cpu_limit_sets_the_number_of_threads_unless_the_template_does() -> None:
    limit = {"resources": {"limits": {"cpu": "2500m"}}}
    own = limit | {"podTemplate": {"spec": {"containers": [{"name": "worker", "env": [THREADS | {"value": "1"}]}]}}}
    objects = objects_of(roles={"reward": limit, "generator": own})
    told = {role: objects["Pod", f"sums-{role}-0"]["spec"]["containers"][0]["env"] for role in ("reward", "generator")}
    assert THREADS | {"value": "2"} in told["reward"]
    assert [each["value"] for each in told["generator"] if each["name"] == "OMP_NUM_THREADS"] == ["1"]


def test_a_job_that_sets_some_resources_keeps_the_others_of_the_chart() -> None:
    chart = {"trainer": {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"cpu": "4", "memory": "8Gi"}}}
    settings = SETTINGS.model_copy(update={"resources": chart})
    own = {"limits": {"nvidia.com/gpu": 1}, "requests": {"memory": "32Gi"}}
    trainer = objects_of(settings, roles={"trainer": {"resources": own}})["Pod", "sums-trainer-0"]
    [container] = trainer["spec"]["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "2", "memory": "32Gi"}, "limits": {"cpu": "4", "nvidia.com/gpu": 1},
    }  # fmt: skip
    assert THREADS | {"value": "4"} in container["env"]
    assert container["image"] == "rlhfspec:cuda"


def test_a_volume_of_a_template_takes_the_place_of_ours() -> None:
    nfs = {"name": "storage", "nfs": {"server": "nas", "path": "/jobs"}}
    settings = SETTINGS.model_copy(update={"pod_template": {"spec": {"volumes": [nfs]}}})
    scratch = {"name": "storage", "emptyDir": {"sizeLimit": "1Gi"}}
    for wanted, template in ((nfs, {}), (scratch, {"spec": {"volumes": [scratch]}})):
        pods = objects_of(settings, podTemplate=template)
        volumes = pods["Pod", "sums-trainer-0"]["spec"]["volumes"]
        assert [each for each in volumes if each["name"] == "storage"] == [wanted]


def test_gpus_of_all_workers_are_counted_in_the_status() -> None:
    world = running(roles={"generator": {"workers": 3, "resources": GPU}, "trainer": {"resources": GPU}})
    assert world.status["gpus"] == 8
    assert world.pods["sums-generator-2"]["spec"]["containers"][0]["resources"] == GPU


# --- gangs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gang", "version"),
    [("volcano", "scheduling.volcano.sh/v1beta1"), ("coscheduling", "scheduling.x-k8s.io/v1alpha1")],
)
def test_pod_groups_come_before_their_pods(gang: str, version: str) -> None:
    queue = {"queue": "q"} if gang == "volcano" else {}
    world = World(job_body(scheduling={"gang": gang, "priorityClass": "high", **queue}))
    world.settle()
    plan = world.run_all().end_pod("sums-prepare-0", 0).plan()
    kinds = [thing["kind"] for thing in plan.create]
    assert kinds.index("PodGroup") < kinds.index("Pod")
    (group,) = (thing for thing in plan.create if thing["kind"] == "PodGroup")
    pods = [thing for thing in plan.create if thing["kind"] == "Pod"]
    assert (group["apiVersion"], group["spec"]["minMember"]) == (version, len(pods))
    for pod in pods:
        marks = pod["metadata"]["labels"] | pod["metadata"]["annotations"]
        assert group["metadata"]["name"] in marks.values()
        assert pod["spec"]["schedulerName"] == ("volcano" if gang == "volcano" else SETTINGS.coscheduler)
        assert pod["spec"]["priorityClassName"] == "high"


def test_generators_spread_over_the_topology() -> None:
    key = "topology.kubernetes.io/zone"
    pod = pod_of("generator", scheduling={"topologyKey": key})
    assert pod["spec"]["topologySpreadConstraints"][0]["topologyKey"] == key
    assert "topologySpreadConstraints" not in pod_of("reward", scheduling={"topologyKey": key})["spec"]


# --- what is missing -------------------------------------------------------------------------------------------------


def test_a_removed_object_is_made_again_when_a_pod_misses_it() -> None:
    world = World()
    world.to_starting()
    world.objects.clear()
    view = world.plan()
    assert view.create == (), "nothing says that it is missing"
    world.pods["sums-reward-0"]["spec"]["nodeName"] = "node1"
    world.pods["sums-reward-0"]["status"] = {
        "phase": "Pending",
        "containerStatuses": [
            {"name": "worker", "state": {"waiting": {"reason": "CreateContainerConfigError",
                                                     "message": 'secret "sums-reward-6f1c-42" not found'}}}
        ],
    }  # fmt: skip
    world.settle(most=2)
    assert set(world.objects) == {("ConfigMap", "sums-connections-6f1c-42"), ("Secret", "sums-reward-6f1c-42")}

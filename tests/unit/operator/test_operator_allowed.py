"""What a job may set in its pods: nothing that reaches a Secret of others, another account, or the node."""

from itertools import product
from typing import Any

import pytest
from operator_world import SETTINGS, World, job_body, running, view_of

from rlhfspec.operator.allowed_fields import Allowed
from rlhfspec.operator.deciding.memory import Memory
from rlhfspec.operator.deciding.reasons import config_problem
from rlhfspec.operator.deciding.situation import Situation
from rlhfspec.operator.making.objects import objects_for


def worker(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "worker", **fields}]}


def volume(**source: Any) -> dict[str, Any]:
    return {"volumes": [{"name": "v", **source}]}


def secret_key(name: str = "another") -> dict[str, Any]:
    return {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": name, "key": "k"}}}


SIDECAR = {"name": "side", "image": "mine"}
# Of the reward, which runs the user's code, and what the refusal ends the field with.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "account": ({"serviceAccountName": "admin"}, "spec.serviceAccountName"),
    "account-of-old": ({"serviceAccount": "admin"}, "spec.serviceAccount"),
    "token": ({"automountServiceAccountToken": True}, "spec.automountServiceAccountToken"),
    "token-volume": (
        volume(projected={"sources": [{"serviceAccountToken": {"path": "t"}}]}),
        "sources[0].serviceAccountToken",
    ),
    "host-path": (volume(hostPath={"path": "/"}), "spec.volumes[0].hostPath"),
    "host-path-empty": (volume(hostPath={}), "spec.volumes[0].hostPath"),
    "csi": (volume(csi={"driver": "x"}), "spec.volumes[0].csi"),
    "ephemeral": (volume(ephemeral={"volumeClaimTemplate": {"spec": {}}}), "volumes[0].ephemeral"),
    "nfs": (volume(nfs={"server": "s", "path": "/"}), "spec.volumes[0].nfs"),
    "network": ({"hostNetwork": True}, "spec.hostNetwork"),
    "processes": ({"hostPID": True}, "spec.hostPID"),
    "ipc": ({"hostIPC": True}, "spec.hostIPC"),
    "host-users": ({"hostUsers": True}, "spec.hostUsers"),
    "port": (worker(ports=[{"containerPort": 80, "hostPort": 80}]), "ports[0].hostPort"),
    "port-of-a-sidecar": ({"initContainers": [{**SIDECAR, "ports": [{"hostIP": "0.0.0.0"}]}]}, "ports[0].hostIP"),
    "probe-of-the-node": (worker(livenessProbe={"httpGet": {"host": "10.0.0.1", "port": 80}}), "livenessProbe"),
    "privileged": (worker(securityContext={"privileged": True}), "securityContext.privileged"),
    "escalation": (worker(securityContext={"allowPrivilegeEscalation": True}), "allowPrivilegeEscalation"),
    "added": (worker(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}), "securityContext.capabilities.add"),
    "kept": (worker(securityContext={"capabilities": {"drop": []}}), "securityContext.capabilities.drop"),
    "some-kept": (worker(securityContext={"capabilities": {"drop": ["KILL"]}}), "securityContext.capabilities.drop"),
    "proc": (worker(securityContext={"procMount": "Unmasked"}), "securityContext.procMount"),
    "root": ({"securityContext": {"runAsUser": 0}}, "spec.securityContext"),
    "sidecar-root": ({"containers": [{**SIDECAR, "securityContext": {"runAsUser": 0}}]}, "securityContext.runAsUser"),
    "context-removed": ({"securityContext": None}, "spec.securityContext"),
    "volumes-removed": ({"volumes": None}, "spec.volumes"),
    "sysctls": ({"securityContext": {"sysctls": [{"name": "a", "value": "1"}]}}, "spec.securityContext"),
    "ephemeral-containers": ({"ephemeralContainers": [SIDECAR]}, "spec.ephemeralContainers"),
    "node": ({"nodeName": "node1"}, "spec.nodeName"),
    "runtime": ({"runtimeClassName": "unconfined"}, "spec.runtimeClassName"),
    "priority": ({"priority": 2_000_000_000}, "spec.priority"),
    "device": (worker(volumeDevices=[{"name": "v", "devicePath": "/dev/sda"}]), "volumeDevices"),
    "whole-claim": (worker(volumeMounts=[{"name": "storage", "mountPath": "/all"}]), "volumeMounts[0].name"),
    "whole-claim-by-path": (worker(volumeMounts=[{"mountPath": "/storage", "subPath": ""}]), "volumeMounts[0].name"),
    "token-mounted": ({"initContainers": [{**SIDECAR, "volumeMounts": [{"name": "token"}]}]}, "volumeMounts[0].name"),
    "unknown": ({"hostNetwrok": True}, "spec.hostNetwrok"),
}
# Of roles that run no code of the user, such as the only one with a way to the Internet.
REFUSED_OF_OURS: dict[str, tuple[dict[str, Any], str]] = {
    "command": (worker(command=["sh"]), "containers[0].command"),
    "arguments": (worker(args=["-c"]), "containers[0].args"),
    "path": (worker(env=[{"name": "PYTHONPATH", "value": "/storage"}]), "env[0].name"),
    "all-variables": (worker(envFrom=[{"secretRef": {"name": "allowed"}}]), "envFrom"),
    "image": (worker(image="mine"), "containers[0].image"),
    "code": (worker(volumeMounts=[{"name": "v", "mountPath": "/usr/lib/python3"}]), "volumeMounts"),
    "sidecar": ({"containers": [SIDECAR]}, "containers[0].image"),
    "first": ({"initContainers": [SIDECAR]}, "initContainers[0].image"),
    "hook": (worker(lifecycle={"postStart": {"exec": {"command": ["sh"]}}}), "lifecycle"),
}


def refusal(**spec: Any) -> str:
    world = World(job_body(**spec))
    world.settle()
    assert world.pods == {}
    assert not world.objects
    assert (world.phase, world.status["reason"]) == ("Failed", "BadConfig")
    return str(world.status["message"])


OF_OURS = ("prepare", "control", "prompts", "trainer", "rebalancer", "gateway")


@pytest.mark.parametrize(("name", "role"), [*product(REFUSED, ["reward"]), *product(REFUSED_OF_OURS, OF_OURS)])
def test_unlisted_pod_fields_are_refused_and_code_in_other_roles_too(name: str, role: str) -> None:
    spec, field = (REFUSED if role == "reward" else REFUSED_OF_OURS)[name]
    for where, changes in (
        ("spec.podTemplate", {"podTemplate": {"spec": spec}}),
        (f"spec.roles.{role}.podTemplate", {"roles": {role: {"podTemplate": {"spec": spec}}}}),
    ):
        said = refusal(**changes)
        assert said.startswith(f"{where}."), said
        assert said.partition(":")[0].endswith(field) or (role, where) == ("reward", "spec.podTemplate"), said


@pytest.mark.parametrize("role", ["prepare", "control"])
def test_an_image_is_refused_in_roles_that_run_no_user_code(role: str) -> None:
    said = refusal(roles={role: {"image": "mine"}})
    assert said.startswith(f"spec.roles.{role}.image: not allowed in pods of {role}")


def test_pod_annotations_are_refused() -> None:
    """They give networks, tokens and cloud roles."""
    said = refusal(podTemplate={"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "host"}}})
    assert said.startswith("spec.podTemplate.metadata.annotations:")


# Every way to name an object of the namespace: role `reward`.
NAMED: dict[str, dict[str, Any]] = {
    "volume": volume(secret={"secretName": "another"}),
    "volume-of-config": volume(configMap={"name": "another"}),
    "projected": volume(projected={"sources": [{"secret": {"name": "another"}}]}),
    "projected-config": volume(projected={"sources": [{"configMap": {"name": "another"}}]}),
    "claim": volume(persistentVolumeClaim={"claimName": "another"}),
    "default-claim": volume(persistentVolumeClaim={"claimName": "runs"}),
    "variable": worker(env=[secret_key()]),
    "config-variable": worker(env=[{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "another", "key": "k"}}}]),
    "variables": worker(envFrom=[{"secretRef": {"name": "another"}}]),
    "variables-of-config": worker(envFrom=[{"configMapRef": {"name": "another"}}]),
    "optional": worker(envFrom=[{"secretRef": {"name": "another", "optional": True}}]),
    "pull": {"imagePullSecrets": [{"name": "another"}]},
    "first": {"initContainers": [{**SIDECAR, "env": [secret_key()]}]},
    "ours": {"volumes": [{"name": "credentials", "secret": {"secretName": "another"}}]},
}


@pytest.mark.parametrize("name", NAMED)
def test_an_object_without_the_label_is_refused_and_one_with_it_is_not(name: str) -> None:
    changes = {"roles": {"reward": {"podTemplate": {"spec": NAMED[name]}}}}
    said = refusal(**changes)
    assert said.startswith("spec.roles.reward.podTemplate.spec.")
    assert "does not exist, or has no label rlhfspec.io/jobs-may-use=true" in said
    World(job_body(**changes), labelled={"another", "runs"}).to_running()


def test_storage_of_the_job_needs_the_label_too() -> None:
    said = refusal(storage={"claim": "another"})
    assert said.startswith("spec.storage.claim: PersistentVolumeClaim another does not")
    store = {"uri": "s3://bucket/team", "secret": "another"}
    assert refusal(storage=store).startswith("spec.storage.secret: Secret another does not exist")
    running(storage={"claim": "runs"})


def test_a_job_begins_once_the_label_is_there() -> None:
    world = World(job_body(storage={"claim": "another"}))
    plan = world.settle()
    assert (world.phase, plan.requeue_seconds) == ("Failed", 15.0)
    world.labelled.add("another")
    world.pass_time(15).to_running()


USUAL = {
    "podTemplate": {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "nodeSelector": {"pool": "training"},
            "affinity": {"podAffinity": {}},
            "terminationGracePeriodSeconds": 900,
            **worker(env=[{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "OMP_NUM_THREADS", "value": "1"}]),
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        },
    },
    "roles": {
        "reward": {
            "image": "mine",
            "podTemplate": {
                "spec": {
                    **worker(
                        command=["python", "-m", "mine"], env=[{"name": "PYTHONPATH", "value": "/mine"}],
                        volumeMounts=[{"name": "mine", "mountPath": "/mine"}, {"name": "tmp", "mountPath": "/var/tmp"}],
                    ),
                    "initContainers": [{**SIDECAR, "restartPolicy": "Always", "ports": [{"containerPort": 80}]}],
                    "volumes": [{"name": "mine", "emptyDir": {}}],
                }
            },
        }
    },
}  # fmt: skip


def test_usual_pod_settings_are_allowed_and_sidecars_have_no_privileges() -> None:
    [sidecar] = running(**USUAL).pods["sums-reward-0"]["spec"]["initContainers"]
    assert sidecar["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_an_administrator_can_allow_more_and_fewer_fields() -> None:
    fields = (*Allowed().fields, "spec.serviceAccountName=judge", "spec.volumes.nfs")
    more = SETTINGS.model_copy(update={"allowed": Allowed(fields=fields, code_roles=("generator",))})

    def problem(role: str, **options: Any) -> str:
        world = World(job_body(roles={role: options}), settings=more)
        return config_problem(situation_of(world))

    assert not problem("control", podTemplate={"spec": {"serviceAccountName": "judge"} | volume(nfs={"server": "s"})})
    assert "serviceAccountName" in problem("control", podTemplate={"spec": {"serviceAccountName": "judge2"}})
    assert not problem("generator", image="mine")
    assert problem("reward", image="mine").startswith("spec.roles.reward.image")


def situation_of(world: World) -> Any:
    return Situation(view_of(world.body), world.observed(), world.settings, world.now, Memory())


def test_a_job_may_not_name_what_the_template_of_the_chart_adds() -> None:
    """Its sidecars and volumes may hold what no user of jobs may read."""
    template = {"spec": {"containers": [{"name": "vault", "image": "v"}], "volumes": [{"name": "keys"}]}}
    cluster = SETTINGS.model_copy(update={"pod_template": template})
    mounting = worker(volumeMounts=[{"name": "keys", "mountPath": "/keys"}])
    for spec in ({"containers": [{"name": "vault", "command": ["sh"]}]}, mounting):
        world = World(job_body(roles={"reward": {"podTemplate": {"spec": spec}}}), settings=cluster)
        assert "this name is reserved by the operator or its chart" in config_problem(situation_of(world))
    world = World(settings=cluster)
    [*_, pod] = objects_for(situation_of(world), [("reward", 0)])
    assert "securityContext" not in pod["spec"]["containers"][1], "the administrator says what it may"

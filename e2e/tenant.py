"""Somebody who may do anything in her own namespaces, `cluster-admin` there, and nothing elsewhere; and what another
tenant has, who must never notice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from cluster import ControlPlane
from kubernetes import client, config
from operators import RELEASE_NAMESPACE, USER, World, example, stages_of, until
from verbs import resource_of

from rlhfspec.cluster import names

MALLORY, HOSTILE, CALM = "mallory", "hostile", "calm"
SAYS_SECONDS = 10.0  # so soon a job says what is wrong with it
OWNED = f"{names.GROUP}/{names.VERSION}"


class Tenant(World):
    """`core` and `jobs` are hers: what she may not do raises."""

    def __init__(self, kubernetes: ControlPlane, *more: str) -> None:
        super().__init__(kubernetes)
        subject = {"kind": "User", "name": MALLORY, "apiGroup": "rbac.authorization.k8s.io"}
        role = {"kind": "ClusterRole", "name": "cluster-admin", "apiGroup": "rbac.authorization.k8s.io"}
        for name in (HOSTILE, *more):
            self.namespace(name)
            binding = {"kind": "RoleBinding", "metadata": {"name": "hers", "namespace": name}, "roleRef": role}
            kubernetes.apply({"apiVersion": "rbac.authorization.k8s.io/v1", **binding, "subjects": [subject]})
        self.api = config.new_client_from_config(str(kubernetes.kubeconfig_of(MALLORY)))
        self.core, self.jobs = client.CoreV1Api(self.api), client.CustomObjectsApi(self.api)

    # --- her jobs ----------------------------------------------------------------------------------------------------

    def make(self, name: str, **spec: Any) -> str:
        """Its uid."""
        job = example(name)
        job["spec"] |= spec
        place = (names.GROUP, names.VERSION, HOSTILE, names.PLURAL)
        return str(self.jobs.create_namespaced_custom_object(*place, job)["metadata"]["uid"])

    def begun(self, name: str, **spec: Any) -> str:
        uid = self.make(name, **spec)
        until(lambda: self.pod(name) is not None, f"{name} begins")
        until(lambda: self.status(HOSTILE, name).get("run", {}).get("uid"), f"{name} has a run")
        return uid

    def running(self, name: str) -> str:
        """All its pods are made; none is ready, since there is no node."""
        uid = self.begun(name)
        self.ends(HOSTILE, names.pod_name(name, names.PREPARE, 0))
        self.wait_for_phase(HOSTILE, name, "Starting")
        wanted = stages_of(self, HOSTILE, name)
        until(lambda: wanted <= set(self.pods(HOSTILE)), f"all of {wanted}")
        return uid

    def pod(self, job: str, role: str = names.PREPARE) -> Any:
        return self.pods(HOSTILE).get(names.pod_name(job, role, 0))

    def change(self, job: str, **body: Any) -> None:
        self.jobs.patch_namespaced_custom_object(names.GROUP, names.VERSION, HOSTILE, names.PLURAL, job, body)

    def write_status(self, job: str, status: Any) -> None:
        place = (names.GROUP, names.VERSION, HOSTILE, names.PLURAL, job)
        self.jobs.patch_namespaced_custom_object_status(*place, {"status": status})

    def delete(self, job: str, how: str = "Background") -> None:
        place = (names.GROUP, names.VERSION, HOSTILE, names.PLURAL, job)
        self.jobs.delete_namespaced_custom_object(*place, propagation_policy=how)

    def is_gone(self, job: str) -> bool:
        return self.job(HOSTILE, job) is None

    def fake(self, name: str, labels: Mapping[str, str], *owners: dict[str, Any], account: str = "default") -> Any:
        """A pod of hers."""
        metadata = {"name": name, "labels": dict(labels), "ownerReferences": list(owners)}
        spec = {"serviceAccountName": account, "containers": [{"name": "worker", "image": "x"}]}
        return self.core.create_namespaced_pod(HOSTILE, {"metadata": metadata, "spec": spec})

    def says(self, job: str, *reasons: str, word: str = "") -> str:
        """In time."""
        asked = datetime.now(UTC)

        def there() -> str:
            status = self.status(HOSTILE, job)
            message = str(status.get("message", ""))
            return message if status.get("reason") in reasons and word in message else ""

        said = until(
            there, f"{job} says {self.status(HOSTILE, job)}, not {reasons} with {word}", seconds=SAYS_SECONDS + 5.0
        )
        healthy = next(each for each in self.status(HOSTILE, job)["conditions"] if each["type"] == "Healthy")
        late = (datetime.fromisoformat(healthy["lastTransitionTime"]) - asked).total_seconds()
        assert late < SAYS_SECONDS, f"{job} said it {late} s later"
        return said


def owner(name: str, uid: str, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": OWNED, "kind": names.KIND, "name": name, "uid": uid, "controller": True, **fields}


def owner_of(pod: Any) -> str:
    """Its uid; empty: there is no such pod, or it is nobody's."""
    return pod.metadata.owner_references[0].uid if pod is not None and pod.metadata.owner_references else ""


# --- the other tenant ------------------------------------------------------------------------------------------------


def settle_calm(world: World) -> None:
    """Jobs of every kind, which go no further by themselves."""
    world.apply(CALM, "waits")
    world.apply(CALM, "sleeps", {"suspend": True})
    for name in ("works", "done", "fails"):
        world.apply(CALM, name)
        until(lambda name=name: f"{name}-prepare-0" in world.pods(CALM), f"{name} begins")
    world.ends(CALM, "fails-prepare-0", 78, "spec.model.path: no such folder")
    for name in ("works", "done"):
        world.ends(CALM, f"{name}-prepare-0")
        world.wait_for_phase(CALM, name, "Starting")
        wanted = stages_of(world, CALM, name)
        until(lambda wanted=wanted: wanted <= set(world.pods(CALM)), f"{name} has its pods")
    world.ends(CALM, "done-trainer-0", 0, "completed: step 30")
    for name, phase in {"waits": "Pending", "sleeps": "Suspended", "done": "Succeeded", "fails": "Failed"}.items():
        world.wait_for_phase(CALM, name, phase)
    until(lambda: all(pod.status.phase != "Pending" or not pod.metadata.name.startswith("done")
                      for pod in world.pods(CALM).values()), "what was left of it is gone")  # fmt: skip


def belongings(world: World) -> dict[tuple[str, str], Any]:
    """What calm has: version by version, and of jobs all but what is a matter of time."""
    found: dict[tuple[str, str], Any] = {}
    for kind in ("pod", "secret", "config_map", "service_account"):
        for thing in getattr(world.core, f"list_namespaced_{kind}")(CALM).items:
            found[kind, thing.metadata.name] = (thing.metadata.uid, thing.metadata.resource_version)
    jobs = world.jobs.list_namespaced_custom_object(names.GROUP, names.VERSION, CALM, names.PLURAL)["items"]
    for job in jobs:
        metadata, status = job["metadata"], job["status"]
        found["job", metadata["name"]] = (metadata["uid"], job["spec"], status["phase"], status.get("internal"))
    return found


OF_TIME = ("rlhfjobs/status", "events")  # such as that a pod is not ready for long


def trespasses(audit: Iterable[Mapping[str, Any]], since: datetime) -> list[str]:
    """What the operator wrote of calm's, or read of anybody's Secrets, and whatever she was granted outside."""
    found = []
    for entry in audit:
        about, user, verb = entry.get("objectRef", {}), entry["user"]["username"], entry["verb"]
        if "resource" not in about or entry["responseStatus"]["code"] >= 400:
            continue
        what = f"{user}: {verb} {resource_of(about)} {about.get('namespace', '')}/{about.get('name', '')}"
        is_write, space = verb not in ("get", "list", "watch"), about.get("namespace", "")
        is_late = datetime.fromisoformat(entry["requestReceivedTimestamp"]) > since
        if user == USER and (space == CALM and is_write and is_late and resource_of(about) not in OF_TIME):
            found.append(what)
        if user == USER and about["resource"] == "secrets" and not is_write:
            found.append(what)
        if user == MALLORY and space in (CALM, RELEASE_NAMESPACE, "kube-system", "default"):
            found.append(what)
    return found

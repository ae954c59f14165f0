"""RLHFJob on a real API server: what it accepts, what it refuses by which field's name, what may change later."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import ControlPlane
from invalid_jobs import FUNCTION, HTTP, JOB, all_wrong, edited
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from rlhfspec.cluster import names
from rlhfspec.cluster.crd import custom_resource_definition
from rlhfspec.cluster.crd_rules import OF_PODS
from rlhfspec.job import RLHFJob
from rlhfspec.job.file.yaml_text import parts_of

pytestmark = pytest.mark.ci
EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.yaml"))
FULL = {
    "device": "cpu", "model.lora": {"rank": 4, "targetModules": ["q_proj"]}, "model.drafter": "owner/drafter",
    "dataset.messagesColumn": "chat", "evaluation": {"everySteps": 5},
    "algorithm": {"name": "dapo", "overlongBuffer": 8}, "generation.stop": ["\n"],
    "rewards.sources": [FUNCTION, HTTP | {"headers": {"key": "${KEY}"}, "weight": 2}],
    "training.optimizer": {"arguments": {"betas": [0.9, 0.95], "fused": True}},
    "training.schedule": {"name": "OneCycleLR", "arguments": {"max_lr": 1.0e-3}},
    "roles.generator": {
        "workers": 2, "replicas": {"min": 1, "max": 4}, "link": "tcp",
        "resources": {"requests": {"cpu": "500m"}, "limits": {"nvidia.com/gpu": 1}},
        "podTemplate": {
            "metadata": {"labels": {"team": "a"}},
            "spec": {"tolerations": [{"operator": "Exists"}], "containers": [{"name": "worker", "env": []}]},
        },
    },
    "roles.control.image": "registry.example/rlhfspec:1",
    "failurePolicy.rules": [{"roles": ["reward"], "exitCodes": [75], "action": "Ignore"}],
    "suspend": False, "activeDeadlineSeconds": 3600, "preRunningDeadlineSeconds": 600,
    "deletionPolicy": {"succeeded": "delete"}, "scheduling": {"gang": "volcano", "queue": "q"},
    "storage": {"claim": "data", "runFolder": "runs/mine"}, "restart": {"id": "1", "roles": ["reward"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[ControlPlane]:
    with ControlPlane(controllers=False) as plane:
        plane.define(custom_resource_definition())
        yield plane


@pytest.fixture(scope="module")
def jobs(cluster: ControlPlane) -> Jobs:
    return Jobs(client.CustomObjectsApi(cluster.client()))


class Jobs:
    """What a user may do with a job, in the namespace default. A refusal is a text that names fields."""

    def __init__(self, api: client.CustomObjectsApi) -> None:
        self._api = api
        self._where = (names.GROUP, names.VERSION, "default", names.PLURAL)

    def create(self, manifest: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        options = {"dry_run": "All"} if dry_run else {}
        return self._api.create_namespaced_custom_object(*self._where, manifest, field_validation="Strict", **options)

    def replace(self, job: dict[str, Any]) -> dict[str, Any]:
        name = job["metadata"]["name"]
        now = self._api.get_namespaced_custom_object(*self._where, name)
        job["metadata"]["resourceVersion"] = now["metadata"]["resourceVersion"]
        return self._api.replace_namespaced_custom_object(*self._where, name, job, field_validation="Strict")

    def start(self, name: str) -> dict[str, Any]:
        status = {"status": {"startTime": "2026-01-01T00:00:00Z", "phase": "Running"}}
        return self._api.patch_namespaced_custom_object_status(*self._where, name, status)

    def set_status(self, name: str, status: dict[str, Any]) -> dict[str, Any]:
        return self._api.patch_namespaced_custom_object_status(*self._where, name, {"status": status})

    def refusal(self, manifest: dict[str, Any]) -> str | None:
        try:
            self.create(manifest, dry_run=True)
        except ApiException as error:
            return said(error)
        return None


def said(error: ApiException) -> str:
    """The fields, as `kubectl apply` shows them."""
    answer = json.loads(error.body)
    assert answer["reason"] in ("Invalid", "BadRequest", "NotFound"), answer
    causes = answer.get("details", {}).get("causes", [])
    return "; ".join(f"{cause.get('field', '')}: {cause.get('message', '')}" for cause in causes) or answer["message"]


def as_job(stored: dict[str, Any]) -> RLHFJob:
    metadata = {key: stored["metadata"][key] for key in ("name", "labels") if key in stored["metadata"]}
    return RLHFJob.model_validate({key: stored[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": metadata})


def test_the_definition_is_structural_and_established(cluster: ControlPlane) -> None:
    conditions = {each["type"]: each for each in cluster.get("crd", "rlhfjobs.rlhfspec.io")["status"]["conditions"]}
    assert conditions["Established"]["status"] == "True"
    assert "NonStructuralSchema" not in conditions


@pytest.mark.parametrize("written_out", [False, True], ids=["as it is", "written out in full"])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_accepted_and_read_back_the_same(jobs: Jobs, example: Path, written_out: bool) -> None:
    manifest = yaml.safe_load(example.read_text())  # YAML 1.1, as kubectl reads it
    manifest["metadata"]["name"] = manifest["metadata"]["name"].replace("+", "-")
    job = RLHFJob.model_validate(manifest)
    if written_out:
        manifest = job.model_dump(mode="json", by_alias=True)
    assert as_job(jobs.create(manifest, dry_run=True)) == job


@pytest.mark.parametrize("written_out", [False, True], ids=["as it is", "written out in full"])
def test_every_kind_of_field_reads_back_the_same(jobs: Jobs, written_out: bool) -> None:
    manifest = edited(FULL)
    job = RLHFJob.model_validate(manifest)
    if written_out:
        manifest = job.model_dump(mode="json", by_alias=True)
    assert as_job(jobs.create(manifest, dry_run=True)) == job


WRONG = [each for each in all_wrong() if each.by != "checks"]


def test_what_is_wrong_is_refused_and_named(jobs: Jobs) -> None:
    assert len(WRONG) > 400
    assert jobs.refusal(JOB) is None
    passed, unnamed = [], []
    for wrong in WRONG:
        refusal = jobs.refusal(wrong.manifest)
        if refusal is None:
            passed.append(str(wrong))
        elif wrong.field not in refusal:
            unnamed.append(f"{wrong}: {refusal}")
    assert (passed, unnamed) == ([], [])


def test_errors_left_to_the_first_pod_pass_the_api_server(jobs: Jobs) -> None:
    """Else it would no longer be left to it. The job of another version is another resource."""
    left = [each for each in all_wrong() if each.by == "checks" and "/apiVersion" not in each.edits]
    assert 0 < len(left) < 10
    assert [str(wrong) for wrong in left if jobs.refusal(wrong.manifest) is not None] == []


MUTABLE: dict[str, Any] = {
    "suspend": True, "activeDeadlineSeconds": 7200, "preRunningDeadlineSeconds": None,
    "deletionPolicy": {"failed": "delete"}, "restart": {"id": "2", "roles": []},
    "roles.generator.workers": 3, "roles.generator.replicas": {"min": 1, "max": 8},
}  # fmt: skip
FIXED: dict[str, Any] = {
    "device": "cuda", "model.path": "other/model", "model.lora.rank": 8, "model.lora.targetModules": ["k_proj"],
    "dataset.path": "other/data", "dataset.messagesColumn": "talk", "evaluation.everySteps": 6,
    "algorithm.name": "gspo", "algorithm.klCoefficient": 0.5, "generation.stop": ["\n", "x"],
    "generation.speculation.mode": "off", "rewards.combine": "min", "rewards.sources[0].weight": 3,
    "rewards.sources[1].headers.key": "other", "training.steps": 200, "training.optimizer.arguments.fused": False,
    "training.schedule.arguments": {}, "roles.generator.link": "shm", "roles.generator.resources.limits.cpu": 1,
    "roles.generator.image": "other", "roles.generator.podTemplate.spec.nodeSelector": {"a": "b"},
    "roles.generator.podTemplate.spec.containers[0].env": [{"name": "A"}], "roles.reward.workers": 2,
    "podTemplate.spec.nodeSelector": {"a": "b"}, "podTemplate.metadata.labels": {"a": "b"},
    "roles.prepare.image": "other", "roles.trainer.ranksPerNode": 2, "failurePolicy.maxRestarts": 9,
    "failurePolicy.rules[0].exitCodes": [1], "rebalance.mode": "off", "checkpoint.keep": 3,
    "observability.view": "off", "observability.wandb": {"project": "p"}, "scheduling.gang": "none",
    "scheduling.topologyKey": "zone", "storage.claim": "other", "storage.runFolder": "runs/other",
}  # fmt: skip


@pytest.fixture(scope="module")
def started(jobs: Jobs) -> dict[str, Any]:
    manifest = edited({"/metadata.name": "started"} | FULL)
    jobs.create(manifest)
    return jobs.start("started")


def with_edit(job: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(job)
    changed["spec"] = edit(changed["spec"], path, value)
    return changed


def edit(spec: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *outer, last = parts_of(path)
    holder: Any = spec
    for part in outer:
        holder = holder.setdefault(part, {}) if isinstance(holder, dict) else holder[int(part)]
    holder[last] = value
    return spec


@pytest.mark.parametrize("path", FIXED)
def test_immutable_fields_cannot_change_once_started(jobs: Jobs, started: dict[str, Any], path: str) -> None:
    with pytest.raises(ApiException) as caught:
        jobs.replace(with_edit(started, path, FIXED[path]))
    refused = [text for text in said(caught.value).split("; ") if "cannot be changed once the job has started" in text]
    assert len(refused) == 1
    named = refused[0].split(":")[0].removeprefix("spec.")
    assert path.startswith(named), refused
    assert "." in named or path == named or named in ("evaluation", "podTemplate"), "the block alone says too little"


def test_immutable_fields_cannot_be_removed_once_started(jobs: Jobs, started: dict[str, Any]) -> None:
    changed = with_edit(started, "storage.claim", None)
    del changed["spec"]["scheduling"]["queue"]
    with pytest.raises(ApiException) as caught:
        jobs.replace(changed)
    refused = said(caught.value)
    assert "spec.scheduling.queue: " in refused
    assert "spec.storage.claim: " in refused


@pytest.mark.parametrize("path", MUTABLE)
def test_mutable_fields_may_change_while_a_job_runs(jobs: Jobs, started: dict[str, Any], path: str) -> None:
    jobs.replace(with_edit(started, path, MUTABLE[path]))
    jobs.replace(with_edit(started, "suspend", False))


def test_what_pods_are_like_is_changed_while_the_job_is_suspended(jobs: Jobs, started: dict[str, Any]) -> None:
    of_pods = [path for path in FIXED if any(f"{path}.".startswith(f"{each}.") for each in OF_PODS)]
    assert len(of_pods) > len({path.rpartition(".")[2] for path in OF_PODS}) == 5
    for path in of_pods:
        changed = with_edit(with_edit(started, "suspend", True), path, FIXED[path])
        jobs.replace(changed)
        jobs.replace(with_edit(changed, "suspend", False))
        with pytest.raises(ApiException, match="unless it is suspended"):
            jobs.replace(with_edit(started, "suspend", False))
        jobs.replace(with_edit(started, "suspend", True))
    jobs.replace(with_edit(started, "suspend", False))


@pytest.mark.parametrize("path", FIXED)
def test_immutable_fields_may_change_before_the_start(jobs: Jobs, path: str) -> None:
    """It was the start, then, that fixed it; what would contradict something else is left out."""
    if path in ("algorithm.name", "rebalance.mode", "scheduling.gang", "model.lora.targetModules"):
        return
    name = f"free-{list(FIXED).index(path)}"
    job = jobs.create(edited({"/metadata.name": name} | FULL))
    jobs.replace(with_edit(job, path, FIXED[path]))


def test_kubectl_shows_and_scales(cluster: ControlPlane, jobs: Jobs) -> None:
    jobs.create(edited({"/metadata.name": "plain"}))
    jobs.set_status(
        "plain",
        {
            "phase": "Running", "generators": 1, "gpus": 8, "reason": "Stalled", "selector": "rlhfspec.io/job=plain",
            "progress": {"step": 12, "totalSteps": 100, "shown": "12/100", "reward": 0.5},
        },
    )  # fmt: skip
    cluster.kubectl("scale", "rlhf/plain", "--replicas=3")
    assert cluster.get("rlhf", "plain")["spec"]["roles"]["generator"]["workers"] == 3
    head, row = cluster.kubectl("get", "rlhf", "plain").splitlines()
    assert head.split() == ["NAME", "PHASE", "STEP", "REWARD", "GENERATORS", "GPUS", "REASON", "AGE"]
    assert row.split()[:-1] == ["plain", "Running", "12/100", "0.5", "1", "8", "Stalled"]
    assert "plain" in cluster.kubectl("get", "rlhfspec")


def test_scaling_stays_within_replicas(cluster: ControlPlane, jobs: Jobs) -> None:
    jobs.create(edited({"/metadata.name": "elastic", "roles.generator.replicas": {"min": 1, "max": 2}}))
    said = cluster.kubectl("scale", "rlhf/elastic", "--replicas=3", check=False)
    assert "must be within replicas" in said
    assert cluster.get("rlhf", "elastic")["spec"]["roles"]["generator"]["workers"] == 1


def test_every_field_of_the_status_is_in_the_schema(jobs: Jobs) -> None:
    jobs.create(edited({"/metadata.name": "status"}))
    status = {
        "phase": "Running", "reason": "Stalled", "message": "m", "observedGeneration": 1, "generators": 2, "gpus": 0,
        "selector": "a=b", "startTime": "2026-01-01T00:00:00Z", "completionTime": "2026-01-01T00:00:00Z",
        "conditions": [
            {"type": "Healthy", "status": "False", "reason": "Stalled", "message": "m", "observedGeneration": 1,
             "lastTransitionTime": "2026-01-01T00:00:00Z"},
        ],
        "run": {"number": 1, "uid": "3a9d33b1", "restartId": "2", "folder": "/storage/runs/a"},
        "roles": {"generator": {"wanted": 2, "ready": 1, "failed": 0}},
        "progress": {"step": 1, "totalSteps": 2, "shown": "1/2", "checkpointStep": 0, "reward": 0.5, "kl": 0.01,
                     "tokensPerSecond": 10.5, "acceptedPerVerification": 2.0, "etaSeconds": 3.5},
        "restarts": {"total": 1, "counted": 1, "byWorker": {"generator-0": 1}},
        "internal": {"number": 1, "workers": {"generator-0": {"counted": 1}}},
    }  # fmt: skip
    assert jobs.set_status("status", status)["status"] == status


def test_what_the_operator_applies_may_become_empty(cluster: ControlPlane, jobs: Jobs) -> None:
    """Server-side apply makes null of a map whose last name is taken away."""
    jobs.create(edited({"/metadata.name": "empties"}))
    head = {"apiVersion": "rlhfspec.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "empties"}}
    for roles, by_worker in (({"reward": {"wanted": 1}}, {"reward-0": 1}), ({}, {})):
        status = {"phase": "Running", "roles": roles, "restarts": {"byWorker": by_worker}, "internal": by_worker}
        applied = json.dumps(head | {"status": status})
        cluster.kubectl("apply", "--server-side", "--subresource=status", "-f", "-", stdin=applied)
    assert not cluster.get("rlhf", "empties")["status"].get("roles")

"""In-memory world of a job for operator tests: API server, kubelets and a manual clock."""

import json
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, Self

from rlhfspec.cluster import names
from rlhfspec.cluster.api import ApiResponse
from rlhfspec.cluster.report import Report
from rlhfspec.errors import Problem
from rlhfspec.job import RLHFJob
from rlhfspec.operator.deciding.memory import maybe_time_of, text_of
from rlhfspec.operator.deciding.observed import DryRunResult, JobView, Observed, PodView, Refusal, Said
from rlhfspec.operator.deciding.reconcile import reconcile
from rlhfspec.operator.deciding.situation import Delete, Event, ReconcilePlan, WorkloadWrite
from rlhfspec.operator.looking.views import manifest_of, pod_view, read
from rlhfspec.operator.making import trial
from rlhfspec.operator.making.workloads import Queueing, workload_view
from rlhfspec.operator.settings import ChartSettings, ImageNames

_READ: dict[str, tuple[RLHFJob | None, tuple[Problem, ...]]] = {}  # by its spec
START = datetime(2026, 1, 1, tzinfo=UTC)


def credentials(namespace: str, job: str, job_uid: str, run: str, role: str, created: datetime) -> dict[str, bytes]:
    key = f"{job} {job_uid} {run} {role} {created:%Y}".encode()
    return {"ca.pem": b"ca", f"{role}.key": key} | ({"serve.token": b"t0ken"} if role == "gateway" else {})


SETTINGS = ChartSettings(
    release="rlhfspec",
    namespace="rlhfspec",
    images=ImageNames(slim="rlhfspec:slim", cpu="rlhfspec:cpu", cuda="rlhfspec:cuda"),
    credentials=credentials,
    proof=lambda *words: "/".join(words),
    nats_url="tls://nats.rlhfspec.svc:4222",
    redis_url="rediss://redis.rlhfspec.svc:6379",
    report_url="https://operator.rlhfspec.svc:8443",
    claim="runs",
)


def spec_of(**changes: Any) -> dict[str, Any]:
    return {
        "model": {"path": "tiny:llama"},
        "dataset": {"path": "sums.jsonl"},
        "algorithm": {"name": "grpo", "klCoefficient": 0.0},
        "rewards": {"sources": [{"type": "function", "function": "rewards:exact"}]},
        "training": {"steps": 10},
        **changes,
    }


def job_body(**changes: Any) -> dict[str, Any]:
    return {
        "apiVersion": "rlhfspec.io/v1alpha1",
        "kind": "RLHFJob",
        "metadata": {
            "name": "sums", "namespace": "rl", "uid": "6f1c-42", "generation": 1, "resourceVersion": "1",
            "creationTimestamp": text_of(START),
        },
        "spec": spec_of(**changes),
        "status": {},
    }  # fmt: skip


def view_of(body: dict[str, Any]) -> JobView:
    key = json.dumps(body["spec"], sort_keys=True)
    if key not in _READ:
        _READ[key] = read(manifest_of(body))
    job, problems = _READ[key]
    metadata = body["metadata"]
    return JobView(
        namespace=metadata["namespace"], name=metadata["name"], uid=metadata["uid"], generation=metadata["generation"],
        resource_version=metadata["resourceVersion"], created=datetime.fromisoformat(metadata["creationTimestamp"]),
        deleting_since=maybe_time_of(metadata.get("deletionTimestamp")), manifest=manifest_of(body),
        leaves_orphans="orphan" in metadata.get("finalizers", ()),
        status=body["status"], job=job, problems=problems,
    )  # fmt: skip


@dataclass
class World:
    """World of a job: `reconcile` applies one plan of the operator, `settle` all until nothing is left to do."""

    body: dict[str, Any] = field(default_factory=job_body)
    settings: ChartSettings = SETTINGS
    now: datetime = START
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    report: Report | None = None
    report_at: datetime | None = None
    listening_since: datetime | None = None
    broker: Said | None = None
    refusals: dict[tuple[str, str], Refusal] = field(default_factory=dict)
    refuse: dict[str, str] = field(default_factory=dict)  # role of pods, or name of an object: what the API server says
    lost_nodes: set[str] = field(default_factory=set)
    words: dict[str, str] = field(default_factory=dict)  # role: what no pod of it can be made of
    labelled: set[str] = field(default_factory=set)  # names of objects with the label
    trial: DryRunResult | None = None
    num_trials: int = 0
    events: list[Event] = field(default_factory=list)
    deletes: list[Delete] = field(default_factory=list)
    made: list[str] = field(default_factory=list)  # names of pods, in order
    workload: Any = None  # Kueue's, of the job
    flavors: dict[str, dict[str, Any]] = field(default_factory=dict)
    priorities: dict[str, int] = field(default_factory=dict)
    workload_writes: list[str] = field(default_factory=list)
    is_gone: bool = False
    num_uids: int = 0

    def observed(self) -> Observed:
        views = [pod_view(pod) for pod in self.pods.values()]
        return Observed(
            pods=tuple(view for view in views if view is not None), report=self.report, report_at=self.report_at,
            refusals=tuple(self.refusals.values()), broker=self.broker, listening_since=self.listening_since,
            trial=self.trial,
            queueing=Queueing(workload_view(self.workload) if self.workload else None, self.flavors, self.priorities),
        )  # fmt: skip

    def plan(self) -> ReconcilePlan:
        return reconcile(view_of(self.body), self.observed(), self.settings, self.now)

    def reconcile(self) -> ReconcilePlan:
        plan = self.plan()
        self.carry_out(plan)
        return plan

    def carry_out(self, plan: ReconcilePlan, *, rng: random.Random | None = None) -> None:
        """Apply a plan; with `rng`, some writes fail."""

        def works() -> bool:
            return rng is None or rng.random() > 0.2

        self.body["status"] = json.loads(json.dumps(plan.status))
        self.events += plan.events
        if (plan.trial or plan.references) and works():
            roles = [pod["metadata"]["labels"][names.ROLE] for pod in plan.trial]
            problem = next((self.words[role] for role in roles if role in self.words), "")
            generation, label = self.body["metadata"]["generation"], self.settings.allowed.label
            answers = [ApiResponse(200 if each.name in self.labelled else 422, {}) for each in plan.references]
            refusal = trial.unlabelled(plan.references, answers, label, self.now, generation)
            self.trial, self.num_trials = refusal or DryRunResult(generation, problem), self.num_trials + 1
        for delete in plan.delete:
            if works():
                self.ask_to_end(delete)
        for _, group in groupby(plan.create, key=lambda manifest: str(manifest["kind"])):
            accepted = [self.accept(manifest) for manifest in group if works()]
            if not all(accepted):
                break
        if plan.workload is not None and works():
            self.write_workload(plan.workload)

    def settle(self, most: int = 60) -> ReconcilePlan:
        for _ in range(most):
            before = json.dumps(self.body, sort_keys=True)
            plan = self.reconcile()
            if plan.is_quiet and json.dumps(self.body, sort_keys=True) == before:
                return plan
        return plan

    def wind_down(self) -> ReconcilePlan:
        """Settle until every pod that was asked to end is gone, but for those of lost nodes."""
        num_pods = -1
        while num_pods != len(self.pods):
            plan, num_pods = self.settle(), len(self.pods)
            self.end_those_asked()
        return plan

    def accept(self, manifest: dict[str, Any]) -> bool:
        """Make an object and return whether it was accepted."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        refused = manifest["metadata"]["labels"][names.ROLE] if kind == "Pod" else name
        if refused in self.refuse:
            self.refusals[kind, name] = Refusal(kind, name, "Forbidden", self.refuse[refused], self.now)
            return False
        self.refusals.pop((kind, name), None)
        if kind != "Pod":
            self.objects[kind, name] = manifest
            return True
        if name in self.pods:  # it is there already: a pod cannot be changed
            return True
        self.num_uids += 1
        pod = json.loads(json.dumps(manifest))
        pod["metadata"] |= {"uid": f"pod-{self.num_uids}", "creationTimestamp": text_of(self.now)}
        pod["status"] = {"phase": "Pending"}
        self.pods[name] = pod
        self.made.append(name)
        return True

    def ask_to_end(self, delete: Delete) -> None:
        if delete.kind == "RLHFJob":
            assert delete.uid == self.body["metadata"]["uid"]
            self.is_gone = True
            return
        pod = self.pods.get(delete.name)
        if pod is None or pod["metadata"]["uid"] != delete.uid:
            return
        self.deletes.append(delete)
        grace = delete.grace_seconds
        if grace is None:
            grace = pod["spec"]["terminationGracePeriodSeconds"]
        if grace == 0 or pod["status"]["phase"] in ("Succeeded", "Failed") or "nodeName" not in pod["spec"]:
            del self.pods[delete.name]
        else:
            pod["metadata"].setdefault("deletionTimestamp", text_of(self.now + timedelta(seconds=grace)))

    def write_workload(self, write: WorkloadWrite) -> None:
        self.workload_writes.append(write.verb)
        if write.verb == "create":
            if self.workload is not None:  # 409
                return
            self.num_uids += 1
            self.workload = json.loads(json.dumps(write.body))
            self.workload["metadata"] |= {
                "uid": f"workload-{self.num_uids}", "resourceVersion": "1", "creationTimestamp": text_of(self.now),
            }  # fmt: skip
            return
        if self.workload is None or self.workload["metadata"]["uid"] != write.uid:  # gone, or another by now
            return
        if write.verb == "delete":
            self.workload = None
        elif write.body["metadata"]["resourceVersion"] == self.workload["metadata"]["resourceVersion"]:
            self._workload_status(**write.body["status"])

    def _workload_status(self, **changes: Any) -> None:
        status = self.workload.get("status", {}) | changes
        self.workload["status"] = {name: value for name, value in status.items() if value is not None}
        self.workload["metadata"]["resourceVersion"] += "1"

    def kueue_says(self, type_: str, is_true: bool, reason: str = "", message: str = "") -> None:
        conditions = {each["type"]: each for each in self.workload.get("status", {}).get("conditions", ())}
        conditions[type_] = self.condition(type_, is_true, reason or type_, message)
        self._workload_status(conditions=list(conditions.values()))

    def admit(self) -> None:
        sets = self.workload["spec"]["podSets"]
        assigned = [{"name": each["name"], "count": each["count"], "flavors": {"cpu": "spot"}} for each in sets]
        self._workload_status(admission={"clusterQueue": "all", "podSetAssignments": assigned})
        for type_ in ("QuotaReserved", "Admitted"):
            self.kueue_says(type_, True)
        self.kueue_says("Evicted", False, "QuotaReserved")

    def evict(self, reason: str, message: str) -> None:
        self.kueue_says("Evicted", True, reason, message)

    def edit(self, **changes: Any) -> Self:
        self.body["spec"] |= changes
        self.body["metadata"]["generation"] += 1
        return self

    def delete_job(self) -> None:
        """Delete the job while a foreign finalizer holds it."""
        self.body["metadata"].setdefault("deletionTimestamp", text_of(self.now))

    def run_pod(self, name: str, node: str = "node1", *, ready: bool = True) -> None:
        pod = self.pods[name]
        pod["spec"]["nodeName"] = node
        pod["status"] = {"phase": "Running", "conditions": [self.condition("Ready", ready)]}

    def run_all(self, node: str = "node1") -> Self:
        for name, pod in self.pods.items():
            if pod["status"]["phase"] == "Pending":
                self.run_pod(name, node)
        return self

    def condition(self, type_: str, is_true: bool, reason: str = "", message: str = "") -> dict[str, Any]:
        return {
            "type": type_, "status": str(is_true), "lastTransitionTime": text_of(self.now), "reason": reason,
            "message": message,
        }  # fmt: skip

    def end_pod(self, name: str, code: int, message: str = "", reason: str = "") -> Self:
        pod = self.pods[name]
        ended = {
            "exitCode": code, "message": message, "reason": reason or ("Error" if code else "Completed"),
            "finishedAt": text_of(self.now),
        }  # fmt: skip
        pod["spec"].setdefault("nodeName", "node1")
        pod["status"] |= {
            "phase": "Failed" if code else "Succeeded",
            "conditions": [self.condition("Ready", False)],
            "containerStatuses": [{"name": "worker", "state": {"terminated": ended}}],
        }
        return self

    def end_those_asked(self) -> Self:
        for name, pod in list(self.pods.items()):
            if pod["metadata"].get("deletionTimestamp") and pod["spec"].get("nodeName") not in self.lost_nodes:
                del self.pods[name]
        return self

    def pass_time(self, seconds: float) -> Self:
        self.now += timedelta(seconds=seconds)
        return self

    def say(self, **report: Any) -> Self:
        self.report = Report(run=self.run_uid, **report)
        self.report_at = self.now
        return self

    @property
    def run_uid(self) -> str:
        return names.run_uid(self.body["metadata"]["uid"], self.status["run"]["number"])

    @property
    def status(self) -> dict[str, Any]:
        return self.body["status"]  # type: ignore[no-any-return]

    @property
    def phase(self) -> str:
        return self.status["phase"]  # type: ignore[no-any-return]

    def healthy(self) -> tuple[str, str, str]:
        condition = next(c for c in self.status["conditions"] if c["type"] == "Healthy")
        return condition["status"], condition["reason"], condition["message"]

    def view(self, name: str) -> PodView:
        return pod_view(self.pods[name])  # type: ignore[return-value]

    def to_starting(self) -> None:
        self.settle()
        self.run_all().settle()
        self.end_pod("sums-prepare-0", 0, "prepared").settle()

    def to_running(self) -> None:
        self.to_starting()
        self.run_all().settle()
        assert self.phase == "Running", self.status


def running(settings: ChartSettings = SETTINGS, **spec: Any) -> World:
    """Return a job that runs; what was done until then is forgotten."""
    world = World(job_body(**spec), settings)
    world.to_running()
    for done in (world.deletes, world.made, world.events):
        done.clear()
    return world

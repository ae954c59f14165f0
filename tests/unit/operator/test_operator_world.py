"""The operator keeps its laws in a random world, and in a kind one every job ends."""

import json
import random
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any

from hypothesis import given, strategies as st
from operator_world import SETTINGS, World, job_body, view_of
from sweeps import examples

from rlhfspec.cluster import names
from rlhfspec.operator.deciding.memory import text_of
from rlhfspec.operator.deciding.observed import Observed
from rlhfspec.operator.deciding.reconcile import reconcile
from rlhfspec.operator.deciding.situation import ReconcilePlan, WorkloadWrite
from rlhfspec.operator.looking.views import pod_view
from rlhfspec.operator.making.pods import CHECKPOINT_SECONDS
from rlhfspec.operator.making.workloads import Queueing, workload_view

Json = dict[str, Any]


class Wild:
    """A world whose operator sees old copies of it. A status write requires the copy that was read."""

    def __init__(self, seed: int, **spec: Any) -> None:
        self.rng = random.Random(seed)
        self.world = World(job_body(**spec), settings=SETTINGS.model_copy(update={"kueue": True}), flavors={"spot": {}})
        self.seen_pods: dict[str, Json] = {}
        self.seen_body: Json = {}
        self.seen_workload: Json | None = None
        self.version = 1
        self.num_ended, self.num_counted = 0, 0  # what truly ended of itself, and of that what counts
        self.watch()

    # --- what the operator sees and does ---

    def watch(self) -> None:
        self.watch_pods()
        self.watch_job()
        self.watch_workload()

    def watch_pods(self) -> None:
        self.seen_pods = json.loads(json.dumps(self.world.pods))

    def watch_job(self) -> None:
        self.seen_body = json.loads(json.dumps(self.world.body))

    def watch_workload(self) -> None:
        self.seen_workload = json.loads(json.dumps(self.world.workload))

    def operate(self, *, fails: bool = False) -> None:
        world = self.world
        if world.is_gone:
            return
        views = [view for pod in self.seen_pods.values() if (view := pod_view(pod))]
        observed = Observed(
            pods=tuple(views), report=world.report, report_at=world.report_at,
            refusals=tuple(world.refusals.values()), trial=world.trial,
            queueing=Queueing(workload_view(self.seen_workload) if self.seen_workload else None, world.flavors, {}),
        )  # fmt: skip
        job = view_of(self.seen_body)
        plan = reconcile(job, observed, world.settings, world.now)
        self.judge(plan, observed)
        status_is_new = plan.status != self.seen_body["status"]
        if status_is_new and self.seen_body["metadata"]["resourceVersion"] != world.body["metadata"]["resourceVersion"]:
            return  # a conflict: nothing of it is done
        if not status_is_new:  # then it is not written, onto whatever is there by now
            plan = replace(plan, status=world.status)
        old_pods = dict(world.pods)
        world.carry_out(plan, rng=self.rng if fails else None)
        self.judge_pods(old_pods)
        if status_is_new:
            self.touched()
            self.seen_body = json.loads(json.dumps(world.body))  # its own write's answer

    def touched(self) -> None:
        self.version += 1
        self.world.body["metadata"]["resourceVersion"] = str(self.version)

    # --- the laws ---

    def judge(self, plan: ReconcilePlan, observed: Observed) -> None:
        again = dict(self.seen_body) | {"status": json.loads(json.dumps(plan.status))}
        second = reconcile(view_of(again), observed, self.world.settings, self.world.now)
        assert second.status == plan.status, "its own result changes nothing more"
        assert second.events == ()
        self.judge_queue(plan, observed)
        restart = self.seen_body["spec"].get("restart", {})
        made = Counter(manifest["metadata"]["name"] for manifest in plan.create if manifest["kind"] == "Pod")
        assert all(count == 1 for count in made.values())
        assert not set(made) & set(self.seen_pods), "never two pods of one worker"
        trainer = self.seen_pods.get("sums-trainer-0")
        gone_by = {pod.name: pod.gone_by for pod in observed.pods}
        lost = {name for name, by in gone_by.items() if by is not None and by < self.world.now}
        memory = plan.status.get("internal", {})
        is_open = memory.get("state") == "open" and plan.status["phase"] in ("Running", "Starting")
        for delete in plan.delete:
            pod = self.seen_pods[delete.name]
            assert delete.grace_seconds != 0 or delete.name in lost, "nobody is forced within its grace"
            role, phase = pod["metadata"]["labels"][names.ROLE], pod["status"]["phase"]
            if role == "trainer" and phase not in ("Succeeded", "Failed"):
                assert delete.grace_seconds in (None, CHECKPOINT_SECONDS), "a trainer has its grace, always"
            counted_in = memory.get("workers", {}).get(delete.name.removeprefix("sums-"), {})
            if is_open and phase in ("Pending", "Running") and not pod["metadata"].get("deletionTimestamp"):
                is_asked = role in restart.get("roles", ())
                assert role == "generator" or is_asked, f"nobody asked to end {delete.name}"
            if is_open and phase == "Failed" and role not in restart.get("roles", ()) and not is_surplus(pod, plan):
                assert counted_in.get("pod") == delete.uid or is_deleting(pod), "how it ended is remembered"
            if trainer and trainer["status"]["phase"] == "Running" and not is_open and role != "trainer":
                pass_on = trainer["metadata"].get("deletionTimestamp") is None
                assert not pass_on, "the trainer goes first"

    def judge_queue(self, plan: ReconcilePlan, observed: Observed) -> None:
        before, after = (body.get("internal", {}).get("number", 0) for body in (self.seen_body["status"], plan.status))
        if before < after and self.seen_body["spec"].get("scheduling"):
            assert observed.queueing.workload.is_admitted, "no run opens without quota"
        if plan.workload is not None and plan.workload.verb in ("delete", "status"):
            is_ready = any(each["type"] == "PodsReady" for each in self.changed_by(plan.workload))
            is_running = any(not pod.is_finished for pod in observed.pods)
            assert is_ready or not is_running, "quota is given back once nothing of the job runs"

    def changed_by(self, write: WorkloadWrite) -> list[Json]:
        was = (self.seen_workload or {}).get("status", {}).get("conditions", [])
        return [each for each in write.body.get("status", {}).get("conditions", ()) if each not in was]

    def judge_pods(self, before: dict[str, Json]) -> None:
        for name, pod in self.world.pods.items():
            if name in before:
                assert pod["metadata"]["uid"] == before[name]["metadata"]["uid"]
        runs = {pod["metadata"]["labels"][names.RUN] for pod in self.world.pods.values()}
        assert len(runs) <= 1, "two runs at once"
        restarts = self.world.status.get("restarts", {"counted": 0, "total": 0})
        assert restarts["counted"] <= self.num_counted, "only what counts is counted, and once"
        assert restarts["total"] <= self.num_ended

    # --- what happens ---

    def some_pod(self, *phases: str) -> str | None:
        names_ = sorted(name for name, pod in self.world.pods.items() if pod["status"]["phase"] in phases)
        return self.rng.choice(names_) if names_ else None

    def start_pod(self) -> None:
        if name := self.some_pod("Pending"):
            self.world.run_pod(name, self.rng.choice(["node1", "node2"]), ready=self.rng.random() < 0.8)

    def ready_pod(self) -> None:
        if name := self.some_pod("Running"):
            self.world.pods[name]["status"]["conditions"] = [self.world.condition("Ready", True)]

    def fail_pod(self) -> None:
        if name := self.some_pod("Running"):
            code, message = self.rng.choice([(1, "boom"), (75, "a server is away"), (137, ""), (139, "")])
            self.world.end_pod(name, code, message)
            counted = self.world.body["spec"].get("failurePolicy", {}).get("counted", ("error", "temporary"))
            self.num_ended += 1
            self.num_counted += {1: "error", 75: "temporary", 137: "killed", 139: "error"}[code] in counted

    def evict_pod(self) -> None:
        if name := self.some_pod("Running"):
            self.world.end_pod(name, 137)
            self.num_ended += 1
            self.world.pods[name]["status"] |= {"reason": "Evicted", "message": "low on memory"}

    def remove_pod(self) -> None:
        if name := self.some_pod("Running", "Pending"):
            self.let_end(self.world.pods[name])

    def let_end(self, pod: Json) -> None:
        pod["metadata"].setdefault("deletionTimestamp", text_of(self.world.now + timedelta(seconds=30)))

    def finish_prepare(self) -> None:
        if self.world.pods.get("sums-prepare-0", {}).get("status", {}).get("phase") == "Running":
            self.world.end_pod("sums-prepare-0", 0, "prepared")

    def finish_trainer(self) -> None:
        if self.world.pods.get("sums-trainer-0", {}).get("status", {}).get("phase") == "Running":
            self.world.end_pod("sums-trainer-0", 0, "completed: step 10")

    def progress(self) -> None:
        if self.world.status.get("run", {}).get("number"):
            step = (self.world.report.step if self.world.report else 0) + 1
            self.world.say(step=step, generators_wanted=self.rng.randint(1, 4))

    def lose_node(self) -> None:
        self.world.lost_nodes = {"node2"}
        for pod in self.world.pods.values():
            if pod["spec"].get("nodeName") == "node2" and pod["status"]["phase"] == "Running":
                self.let_end(pod)
        self.world.pass_time(self.rng.choice([0, 50]))

    def node_comes_back(self) -> None:
        self.world.lost_nodes.clear()

    def end_those_asked(self) -> None:
        self.world.end_those_asked()

    def pass_time(self) -> None:
        self.world.pass_time(self.rng.choice([0.1, 1.0, 10.0, 40.0]))

    def toggle_suspend(self) -> None:
        self.edit(suspend=not self.world.body["spec"].get("suspend", False))

    def restart(self) -> None:
        roles = self.rng.choice([[], ["reward"], ["generator"], ["trainer", "reward"]])
        self.edit(restart={"id": str(self.rng.randint(1, 3)), "roles": roles})

    def refuse(self) -> None:
        self.world.refuse = {} if self.world.refuse else {"reward": "exceeded quota: pods"}

    def kueue_admits(self) -> None:
        workload = self.world.workload
        if workload and not workload_view(workload).is_true("Finished") and not workload_view(workload).holds_quota:
            self.world.admit()

    def kueue_evicts(self) -> None:
        if self.world.workload and workload_view(self.world.workload).is_admitted:
            self.world.evict(self.rng.choice(["Preempted", "Deactivated"]), "for another")

    def somebody_deletes_the_workload(self) -> None:
        self.world.workload = None

    def edit(self, **changes: Any) -> None:
        if not self.world.is_gone:
            self.world.edit(**changes)
            self.touched()

    def delete_job(self) -> None:
        if self.rng.random() < 0.1:
            self.world.delete_job()
            self.touched()

    HAPPENINGS = (
        start_pod, start_pod, start_pod, ready_pod, ready_pod, fail_pod, evict_pod, remove_pod, finish_prepare,
        finish_prepare, finish_trainer, progress, lose_node, node_comes_back, end_those_asked, end_those_asked,
        pass_time, pass_time, toggle_suspend, restart, refuse, delete_job, kueue_admits, kueue_admits, kueue_evicts,
        somebody_deletes_the_workload,
    )  # fmt: skip

    def be_wild(self, num_events: int) -> None:
        for _ in range(num_events):
            if self.world.is_gone:
                return
            self.rng.choice(self.HAPPENINGS)(self)
            if self.rng.random() < 0.7:
                self.watch_pods()
            if self.rng.random() < 0.7:
                self.watch_job()
            if self.rng.random() < 0.7:
                self.watch_workload()
            if self.rng.random() < 0.7:
                self.operate(fails=self.rng.random() < 0.3)

    def be_kind(self) -> None:
        world = self.world
        world.refuse = {}
        world.lost_nodes.clear()
        for round_ in range(80):
            self.kueue_admits()
            self.watch()
            self.operate()
            world.end_those_asked()
            for name in list(world.pods):
                if world.pods[name]["status"]["phase"] == "Pending":
                    world.run_pod(name)
                elif world.pods[name]["status"]["phase"] == "Running":
                    self.world.pods[name]["status"]["conditions"] = [self.world.condition("Ready", True)]
            self.finish_prepare()
            if round_ == 40 and world.phase == "Running":
                roles = [pod["metadata"]["labels"][names.ROLE] for pod in world.pods.values()]
                assert roles.count("generator") == world.status["internal"]["generators"]
            if round_ > 40:
                self.finish_trainer()
            world.pass_time(20)
            if round_ > 45 and world.phase in ("Succeeded", "Failed", "Suspended") and world.plan().is_quiet:
                return


def is_deleting(pod: Json) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def is_surplus(pod: Json, plan: ReconcilePlan) -> bool:
    labels = pod["metadata"]["labels"]
    return labels[names.ROLE] == "generator" and int(labels[names.WORKER]) >= plan.status["internal"]["generators"]


SPECS: tuple[Json, ...] = (
    {},
    {"roles": {"generator": {"workers": 2, "replicas": {"min": 1, "max": 4}}, "reward": {"workers": 2}}},
    {"failurePolicy": {"maxRestarts": 1, "counted": ["error", "temporary", "killed"]}},
    {"suspend": True, "deletionPolicy": {"succeeded": "delete", "failed": "delete"}},
    {"scheduling": {"gang": "kueue"}, "roles": {"generator": {"workers": 2}}},
)


@examples(25, whole=120)
@given(seed=st.integers(0, 2**32), spec=st.sampled_from(SPECS), count=st.integers(0, 120), is_warm=st.booleans())
def test_invariants_hold_under_random_events_and_all_jobs_end(seed: int, spec: Json, count: int, is_warm: bool) -> None:
    wild = Wild(seed, **json.loads(json.dumps(spec)))
    if is_warm and not spec.get("suspend"):
        wild.world.settle()
        wild.kueue_admits()
        wild.world.to_running()
        wild.watch()
    wild.be_wild(count)
    wild.be_kind()
    world = wild.world
    if world.body["metadata"].get("deletionTimestamp"):
        assert set(world.pods) <= {"sums-trainer-0"}, "all but a trainer whose node was lost"
        return
    suspended = world.body["spec"].get("suspend", False)
    assert world.phase in ({"Suspended", "Succeeded", "Failed"} if suspended else {"Succeeded", "Failed"})
    running = [name for name, pod in world.pods.items() if pod["status"]["phase"] in ("Pending", "Running")]
    assert running == [], "what is over frees everything"
    if world.phase == "Suspended":
        assert world.pods == {}
    if world.workload is not None and world.phase != "Suspended":
        assert workload_view(world.workload).is_true("Finished"), "the quota too"
    wild.watch()
    assert world.plan().is_quiet


def test_a_job_without_disturbances_succeeds() -> None:
    wild = Wild(0)
    wild.be_kind()
    assert wild.world.phase == "Succeeded"
    assert wild.world.status["restarts"]["total"] == 0

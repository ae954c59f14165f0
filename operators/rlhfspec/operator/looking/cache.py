"""Cache of jobs and pods, in which older resource versions never replace newer ones."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from rlhfspec.cluster import names
from rlhfspec.cluster.report import Report
from rlhfspec.job.cluster import DEFAULT_MANAGER
from rlhfspec.operator.deciding.memory import INTERNAL
from rlhfspec.operator.deciding.observed import DryRunResult, JobView, Observed, PodView, Refusal, Said
from rlhfspec.operator.looking.queue import Key
from rlhfspec.operator.looking.views import job_view, pod_view
from rlhfspec.operator.making.workloads import Workloads, owner_of

Json = dict[str, Any]
Kind = Literal["job", "pod", "workload"]
_MOST_WARNINGS = 5  # per pod
MOST_GONE = 10_000  # uids remembered as deleted
WARNINGS = "type=Warning,involvedObject.kind=Pod"  # field selector of useful events


@dataclass(slots=True)
class _Pod:
    view: PodView
    version: int
    marked: float | None = None  # when its deletion was first seen
    warnings: deque[tuple[str, Said]] = field(default_factory=lambda: deque(maxlen=_MOST_WARNINGS))  # by event name


@dataclass(slots=True)
class _CachedJob:
    view: JobView
    version: int
    report: Report | None = None
    report_at: datetime | None = None
    refusals: dict[tuple[str, str], Refusal] = field(default_factory=dict)
    trial: DryRunResult | None = None
    status_written: datetime | None = None


class Cache:
    """Cache of jobs, pods and warnings; `runs_changed` is called when an open run changes."""

    def __init__(
        self, *, now: Callable[[], float] = time.monotonic, runs_changed: Callable[[], None] = lambda: None
    ) -> None:
        self._now = now
        self._runs_changed = runs_changed
        self.broker: Said | None = None
        self.listening_since: datetime | None = None  # when this replica began to receive reports
        self._jobs: dict[Key, _CachedJob] = {}
        self._pods: dict[Key, dict[str, _Pod]] = {}
        self._pod_by_uid: dict[str, tuple[Key, str]] = {}
        self.left: set[str] = set()  # namespaces that were once unwatched
        self._gone: OrderedDict[str, int] = OrderedDict()  # uid: resourceVersion at its deletion
        self.workloads = Workloads()

    # --- from watches: each returns the affected job -----------------------------------------------------------------

    def put_job(self, job: Json) -> Key | None:
        if job["spec"].get("managedBy", DEFAULT_MANAGER) != DEFAULT_MANAGER:
            return None  # managed by another controller; immutable
        metadata = job["metadata"]
        key, version = (metadata["namespace"], metadata["name"]), int(metadata["resourceVersion"])
        held = self._jobs.get(key)
        if self._is_gone(metadata) or (held is not None and held.version >= version):
            return None
        view = job_view(job, held.view if held is not None else None)
        if held is None or held.view.uid != view.uid:
            self._jobs[key] = _CachedJob(view, version)
        else:
            before, held.view, held.version = _open_run(held.view), view, version
            if before == _open_run(view):
                return key
        self._runs_changed()
        return key

    def remove_job(self, job: Json) -> Key | None:
        metadata = job["metadata"]
        key = (metadata["namespace"], metadata["name"])
        self._forget(metadata["uid"], int(metadata["resourceVersion"]))
        if (held := self._jobs.get(key)) is not None and held.view.uid == metadata["uid"]:
            del self._jobs[key]
            self._runs_changed()
            return key
        return None

    def put_pod(self, pod: Json) -> Key | None:
        metadata = pod["metadata"]
        if self._is_gone(metadata):
            return None
        owner, known = owner_of(metadata), self._pod_by_uid.get(metadata["uid"])
        key = (metadata["namespace"], owner["name"]) if owner is not None else None
        if key is None or (known is not None and known[0] != key):  # its owner was removed
            return self.remove_pod(pod) if known is not None else None
        name, version = metadata["name"], int(metadata["resourceVersion"])
        held = self._pods.get(key, {}).get(name)
        if (held is not None and held.version >= version) or (view := pod_view(pod)) is None:
            return None
        if held is None or held.view.uid != view.uid:
            if held is not None:
                self._remove_pod(held.view.uid)
            self._pods.setdefault(key, {})[name] = _Pod(view, version)
            self._pod_by_uid[view.uid] = (key, name)
        else:
            held.view, held.version = view, version
        if view.is_deleting:
            held = self._pods[key][name]
            held.marked = self._now() if held.marked is None else held.marked
        return key

    def remove_pod(self, pod: Json) -> Key | None:
        """Remove a pod that was deleted or lost its labels."""
        return self._remove_pod(pod["metadata"]["uid"], int(pod["metadata"].get("resourceVersion", 0)))

    def _remove_pod(self, uid: str, version: int = 0) -> Key | None:
        found = self._pod_by_uid.pop(uid, None)
        held = self._pods[found[0]][found[1]].version if found is not None else 0
        self._forget(uid, max(version, held))
        if found is None:
            return None
        key, name = found
        if (job := self._jobs.get(key)) is not None:
            job.refusals.pop(("Pod", name), None)  # it no longer blocks the name
        del self._pods[key][name]
        if not self._pods[key]:
            del self._pods[key]
        return key

    def put_warning(self, event: Json) -> Key | None:
        """Store a warning about a known pod of its namespace; return its job if new."""
        about, name = event["involvedObject"], event["metadata"]["name"]
        found = self._pod_by_uid.get(about.get("uid", ""))
        if found is None or found[0][0] != event["metadata"]["namespace"]:
            return None
        key, pod = found
        warnings = self._pods[key][pod].warnings
        said = Said(event.get("reason", ""), " ".join(event.get("message", "").split()))
        if (name, said) in warnings:
            return None
        for old in [each for each in warnings if each[0] == name]:
            warnings.remove(old)
        warnings.append((name, said))
        return key

    def _is_gone(self, metadata: Json) -> bool:
        return self._gone.get(metadata["uid"], -1) >= int(metadata["resourceVersion"])

    def _forget(self, uid: str, version: int) -> None:
        self._gone[uid] = version
        if len(self._gone) > MOST_GONE:
            self._gone.popitem(last=False)

    def uids(self, kind: Kind, namespace: str | None) -> set[str]:
        """Return the cached uids, as `before` of `listed`; call this before a list begins."""
        if kind == "workload":
            return self.workloads.uids(namespace)
        if kind == "job":
            return {job.view.uid for key, job in self._jobs.items() if namespace in (None, key[0])}
        return {uid for uid, (key, _) in self._pod_by_uid.items() if namespace in (None, key[0])}

    def listed(self, kind: Kind, before: set[str], found: Iterable[str]) -> list[Key]:
        """Remove objects of `before` that a list did not find, and return their jobs."""
        gone = before - set(found)
        if kind == "workload":
            return self.workloads.gone(gone)
        if kind == "pod":
            return [key for uid in gone if (key := self._remove_pod(uid)) is not None]
        keys = [key for key, job in self._jobs.items() if job.view.uid in gone]
        for key in keys:
            job = self._jobs.pop(key)
            self._forget(job.view.uid, job.version)
        if keys:
            self._runs_changed()
        return keys

    def leave(self, namespace: str) -> None:
        """Forget a namespace that is no longer watched, without recording its objects as deleted."""
        self.left.add(namespace)
        self._jobs = {key: job for key, job in self._jobs.items() if key[0] != namespace}
        self._pods = {key: pods for key, pods in self._pods.items() if key[0] != namespace}
        self._pod_by_uid = {uid: held for uid, held in self._pod_by_uid.items() if held[0][0] != namespace}
        self.workloads.leave(namespace)

    # --- from the operator itself ------------------------------------------------------------------------------------

    def put_report(self, key: Key, report: Report, now: datetime) -> None:
        if (job := self._jobs.get(key)) is not None:
            job.report, job.report_at = report, now

    def refused(self, key: Key, refusal: Refusal) -> bool:
        """Record an object's refusal and return whether it is new."""
        if (job := self._jobs.get(key)) is None:
            return False
        last = job.refusals.get((refusal.kind, refusal.name))
        job.refusals[refusal.kind, refusal.name] = refusal
        return last is None or (last.reason, last.message) != (refusal.reason, refusal.message)

    def accepted(self, key: Key, kind: str, name: str) -> bool:
        """Forget an object's refusal and return whether there was one."""
        job = self._jobs.get(key)
        return job is not None and job.refusals.pop((kind, name), None) is not None

    def tried(self, key: Key, trial: DryRunResult) -> None:
        if (job := self._jobs.get(key)) is not None:
            job.trial = trial

    def is_leaving(self, key: Key, pod: str) -> bool:
        """Return whether a pod of this name is being deleted."""
        held = self._pods.get(key, {}).get(pod)
        return held is not None and held.view.is_deleting

    def wrote_status(self, key: Key, now: datetime) -> None:
        if (job := self._jobs.get(key)) is not None:
            job.status_written = now

    def status_written(self, key: Key) -> datetime | None:
        return self._jobs[key].status_written if key in self._jobs else None

    def jobs(self) -> list[Key]:
        return list(self._jobs)

    def job(self, key: Key) -> JobView | None:
        return held.view if (held := self._jobs.get(key)) is not None else None

    def open_runs(self) -> set[tuple[str, str]]:
        """Return (namespace, uid) of every open run."""
        return {(job.namespace, uid) for uid, job in self.jobs_of_open_runs().items()}

    def jobs_of_open_runs(self) -> dict[str, JobView]:
        """Return the jobs of open runs, by run uid."""
        return {uid: job.view for job in self._jobs.values() if (uid := _open_run(job.view))}

    def live_runs(self) -> set[str]:
        """Return the uids of open runs, and of runs with live pods."""
        of_pods = {pod.view.run for pods in self._pods.values() for pod in pods.values() if pod.view.is_running}
        return of_pods | {uid for _, uid in self.open_runs()}

    def observed(self, key: Key) -> Observed:
        job = self._jobs[key]
        return Observed(
            pods=tuple(self.pods(key)),
            report=job.report,
            report_at=job.report_at,
            listening_since=self.listening_since,
            refusals=tuple(job.refusals.values()),
            trial=job.trial,
            broker=self.broker,
            queueing=self.workloads.of(job.view.uid),
        )

    def pods(self, key: Key) -> list[PodView]:
        """Return the pods of a job, without those of an earlier job with the same name."""
        job = self._jobs.get(key)
        held = sorted(self._pods.get(key, {}).items())
        return [
            replace(pod.view, gone_by=self._gone_by(pod), warnings=tuple(said for _, said in pod.warnings))
            for _, pod in held
            if job is not None and pod.view.owner == job.view.uid
        ]

    def _gone_by(self, pod: _Pod) -> datetime | None:
        """Return when a deleted pod's grace period ends by the local clock, or None."""
        if pod.marked is None:
            return None
        return datetime.now(UTC) + timedelta(seconds=pod.view.grace_seconds - (self._now() - pod.marked))


def _open_run(view: JobView) -> str:
    """Return the uid of the open run, or an empty text."""
    internal = view.status.get(INTERNAL)
    if not isinstance(internal, dict):
        return ""
    number, state = internal.get("number", 0), internal.get("state", "closed")
    return names.run_uid(view.uid, number) if number and state != "closed" else ""

"""Reconcile of one job. Responses to writes enter the cache before their watch events arrive."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from rlhfspec.cluster import names
from rlhfspec.cluster.api import JOB_VERSION, Api, ApiResponse, in_parallel
from rlhfspec.errors import ClusterRefused, ClusterUnavailable, LeadershipLost
from rlhfspec.operator.deciding.observed import DryRunResult, JobView, Observed, Refusal
from rlhfspec.operator.deciding.reasons import LEAVING
from rlhfspec.operator.deciding.reconcile import reconcile
from rlhfspec.operator.deciding.situation import Delete, Event, ReconcilePlan, WorkloadWrite
from rlhfspec.operator.deciding.status import seconds_to_write, undecided
from rlhfspec.operator.looking.cache import Cache
from rlhfspec.operator.looking.queue import Key, ReconcileResult
from rlhfspec.operator.making import trial, workloads
from rlhfspec.operator.settings import ChartSettings

UNDECIDED_SECONDS = 60.0  # retry of a job on which the decision failed
_SAME_EVENT_SECONDS = 300.0  # shortest time between two writes of the same event
_REMEMBERED_EVENTS = 5000  # events remembered
LONGEST_MESSAGE = 1000
LOG = logging.getLogger(__name__)


class Conflict(Exception):
    """Raised when the job was changed since it was read."""


class Reconciler:
    def __init__(
        self,
        cache: Cache,
        api: Api,
        settings: ChartSettings,
        *,
        decide: Callable[[JobView, Observed, ChartSettings, datetime], ReconcilePlan] = reconcile,
    ) -> None:
        self._cache = cache
        self._api = api
        self._settings = settings
        self._decide = decide
        self._events = EventRecorder(api)

    async def reconcile(self, key: Key) -> ReconcileResult:
        job = self._cache.job(key)
        if job is None:
            return ReconcileResult(gone=True)
        now = datetime.now(UTC)
        try:
            plan = await asyncio.to_thread(self._decide, job, self._cache.observed(key), self._settings, now)
        except Exception as error:  # unforeseen input
            LOG.exception("%s cannot be decided", "/".join(key))
            status, events = undecided(job, error, now)
            plan = ReconcilePlan(status=status, events=tuple(events), requeue_seconds=UNDECIDED_SECONDS)
        try:
            again_seconds = await self._carry_out(key, job, plan, now)
        except Conflict:
            return ReconcileResult(failed=True)  # the watch will bring the newer version
        except (ClusterUnavailable, LeadershipLost) as error:
            LOG.warning("%s: %s", "/".join(key), error)
            if isinstance(error, ClusterRefused):  # the API server refused the status: write one with that error
                with suppress(Conflict, ClusterUnavailable):
                    await self._write_status(key, job, undecided(job, error, now)[0], now)
            return ReconcileResult(failed=True)
        soonest = min((each for each in (plan.requeue_seconds, again_seconds) if each is not None), default=None)
        return ReconcileResult(soonest, None if plan.is_quiet else _deeds(plan))

    async def _carry_out(self, key: Key, job: JobView, plan: ReconcilePlan, now: datetime) -> float | None:
        """Carry out a plan in order and return the seconds until a requeue, or None."""
        put_off = seconds_to_write(job.status, plan.status, self._cache.status_written(key), now)
        if not plan.is_quiet or put_off == 0.0:
            await self._write_status(key, job, plan.status, now)
            put_off = None
        for event in plan.events:
            await self._say(job, event)
        if plan.trial or plan.references:
            await self._try(key, job, plan, now)
        await in_parallel([self._delete(key, each) for each in plan.delete])
        learned = await self._create(key, plan.create, now)
        learned |= await self._write_workload(key, plan.workload, now)
        return 0.0 if learned or plan.trial or plan.references else put_off

    async def _try(self, key: Key, job: JobView, plan: ReconcilePlan, now: datetime) -> None:
        label, asked = self._settings.allowed.label, plan.references
        answers = await in_parallel(
            [self._api.test_label(key[0], each.kind, each.name, label, "true") for each in asked]
        )
        refusal = trial.unlabelled(asked, answers, label, now, job.generation)
        if refusal is not None:
            self._cache.tried(key, refusal)
            return
        pods = plan.trial
        answers = await in_parallel([self._api.create(pod, dry_run=True) for pod in pods])
        problem = trial.problem_of(job.job, pods, answers)
        self._cache.tried(key, DryRunResult(job.generation, problem))
        for name, answer in () if problem else trial.refusals(pods, answers):
            self._refused(key, "Pod", name, answer, now)

    async def _write_status(self, key: Key, job: JobView, status: dict[str, Any], now: datetime) -> None:
        if status != job.status:
            answer = await self._api.write_status(job.namespace, job.name, job.uid, job.resource_version, status)
            if answer.code in (404, 409):
                raise Conflict
            if answer.is_refused:
                raise ClusterRefused(f"write of {'/'.join(key)}", answer.message)
            self._cache.put_job(answer.body)
            self._cache.wrote_status(key, now)

    async def _say(self, job: JobView, event: Event) -> None:
        answer = await self._events.say(job, event)
        if answer is not None and answer.is_refused:
            LOG.warning("an event of %s/%s was refused: %s", job.namespace, job.name, answer.message)

    async def _delete(self, key: Key, asked: Delete) -> ApiResponse:
        version = JOB_VERSION if asked.kind == names.KIND else "v1"
        answer = await self._api.delete(
            version, asked.kind, key[0], asked.name, uid=asked.uid, grace_seconds=asked.grace_seconds
        )
        if answer.is_missing and asked.kind == "Pod":
            self._cache.remove_pod({"metadata": {"uid": asked.uid}})
        elif not answer.is_refused:
            LOG.info("%s: deleted %s %s", "/".join(key), asked.kind, asked.name)
            if answer.body.get("kind") == "Pod" and "deletionTimestamp" in answer.body["metadata"]:
                self._cache.put_pod(answer.body)
        elif answer.code not in (404, 409):  # 409: another object by now
            raise ClusterUnavailable(f"deletion of {asked.name}", answer.message)
        return answer

    async def _create(self, key: Key, things: tuple[dict[str, Any], ...], now: datetime) -> bool:
        """Create objects kind by kind, up to a refused kind, and return whether to reconcile again."""
        learned = False
        for kind, group in groupby(things, key=lambda thing: str(thing["kind"])):
            asked = list(group)
            answers = await in_parallel([self._make(thing) for thing in asked])
            for thing, answer in zip(asked, answers, strict=True):
                learned |= self._made(key, kind, thing["metadata"]["name"], answer, now)
            if any(answer.is_refused for answer in answers):
                break
        return learned

    async def _write_workload(self, key: Key, write: WorkloadWrite | None, now: datetime) -> bool:
        """Write the Workload and return whether to reconcile again."""
        if write is None:
            return False
        version, kind, known = workloads.WORKLOAD_VERSION, workloads.WORKLOAD_KIND, self._cache.workloads
        if write.verb == "create":
            answer = await self._api.create(write.body)
        elif write.verb == "status":
            answer = await self._api.merge(version, kind, key[0], write.name, write.body, status=True)
        else:
            answer = await self._api.delete(version, kind, key[0], write.name, uid=write.uid, grace_seconds=None)
        if answer.code == 409:
            return False  # a watch event follows
        is_gone = answer.is_missing if write.verb == "status" else write.verb == "delete"
        if answer.is_refused and not (is_gone and answer.is_missing):
            return self._refused(key, kind, write.name, answer, now)
        LOG.info("%s: %s of %s %s", "/".join(key), write.verb, kind, write.name)
        known.remove({"metadata": {"uid": write.uid}}) if is_gone else known.put(answer.body)
        self._cache.accepted(key, kind, write.name)
        return True

    async def _make(self, thing: dict[str, Any]) -> ApiResponse:
        """Create an object, or update an existing one of the same owner."""
        answer = await self._api.create(thing)
        if not answer.is_taken:
            return answer
        fields = ("data", "spec") if thing["kind"] != "Pod" else ()  # pods are immutable
        taken_up = await self._api.take_up(thing, [field for field in fields if field in thing])
        return answer if taken_up.is_of_another else taken_up

    def _made(self, key: Key, kind: str, name: str, answer: ApiResponse, now: datetime) -> bool:
        if answer.is_refused:
            return self._refused(key, kind, name, answer, now)
        LOG.info("%s: made %s %s", "/".join(key), kind, name)
        was_refused = self._cache.accepted(key, kind, name)
        if kind == "Pod":
            self._cache.put_pod(answer.body)
        return was_refused or kind == "Pod"  # the uid of a pod goes into the status at once

    def _refused(self, key: Key, kind: str, name: str, answer: ApiResponse, now: datetime) -> bool:
        reason = str(answer.body.get("reason") or answer.code)
        if answer.is_taken and kind == "Pod" and self._cache.is_leaving(key, name):
            reason = LEAVING
        LOG.warning("%s: %s %s is refused: %s", "/".join(key), kind, name, answer.message)
        return self._cache.refused(key, Refusal(kind, name, reason, answer.message, now))


def _deeds(plan: ReconcilePlan) -> object:
    """Return a value that is equal for plans with the same actions."""
    made = [(thing["kind"], thing["metadata"]["name"]) for thing in plan.create]
    queued = plan.workload and (plan.workload.verb, plan.workload.uid)
    return (made, plan.delete, queued, plan.references, [pod["metadata"]["name"] for pod in plan.trial])


@dataclass(slots=True)
class _RecordedEvent:
    first: str
    count: int = 0
    written: float = float("-inf")


class EventRecorder:
    """Writer of Kubernetes events; a repeated event only increases its count."""

    def __init__(self, api: Api, *, now: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._now = now
        self._said: OrderedDict[str, _RecordedEvent] = OrderedDict()

    async def say(self, job: JobView, event: Event) -> ApiResponse | None:
        """Write an event, unless it was written recently."""
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        digest = hashlib.sha256(f"{job.uid}/{event.type}/{event.reason}/{event.message}".encode()).hexdigest()[:16]
        said = self._said.setdefault(digest, _RecordedEvent(at))
        self._said.move_to_end(digest)
        if len(self._said) > _REMEMBERED_EVENTS:
            self._said.popitem(last=False)
        said.count += 1
        if self._now() - said.written < _SAME_EVENT_SECONDS:
            return None
        said.written = self._now()
        about = {"apiVersion": JOB_VERSION, "kind": names.KIND, "namespace": job.namespace, "name": job.name}
        return await self._api.apply(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": f"{job.name}.{digest}", "namespace": job.namespace},
                "involvedObject": about | {"uid": job.uid, "resourceVersion": job.resource_version},
                "type": event.type,
                "reason": event.reason,
                "message": event.message[:LONGEST_MESSAGE],
                "firstTimestamp": said.first,
                "lastTimestamp": at,
                "count": said.count,
                "source": {"component": names.FIELD_MANAGER},
                "reportingComponent": names.FIELD_MANAGER,
                "reportingInstance": names.FIELD_MANAGER,
            }
        )

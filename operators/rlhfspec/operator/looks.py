"""One look at one job: what is known of it, what `reconcile` makes of that, and the doing.

What was done is known at once, not only when the watches tell it: the answer to each write goes into the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from rlhfspec.cluster import names
from rlhfspec.cluster.api import JOB_VERSION, Answer, Api, in_parallel
from rlhfspec.errors import ClusterRefused, ClusterUnavailable, LeadershipLost
from rlhfspec.operator.cache import Cache
from rlhfspec.operator.events import Events
from rlhfspec.operator.observed import JobView, Observed, Refusal, Settings
from rlhfspec.operator.plan import Delete, Event, Plan
from rlhfspec.operator.queue import Key, Looked
from rlhfspec.operator.reconcile import reconcile
from rlhfspec.operator.status import is_worth_writing, undecided

UNDECIDED_SECONDS = 60.0  # before a job that cannot be decided is tried again
LOG = logging.getLogger(__name__)
Purge = Callable[[str, str], Awaitable[bool]]  # a job's name, a run's uid: whether its streams are gone


class Conflict(Exception):
    """Somebody wrote the job since we looked."""


class Looks:
    def __init__(
        self,
        cache: Cache,
        api: Api,
        settings: Settings,
        purge: Purge,
        *,
        decide: Callable[[JobView, Observed, Settings, datetime], Plan] = reconcile,
    ) -> None:
        self._cache = cache
        self._api = api
        self._settings = settings
        self._purge = purge
        self._decide = decide
        self._events = Events(api)

    async def look(self, key: Key) -> Looked:
        job = self._cache.job(key)
        if job is None:
            return Looked(gone=True)
        now = datetime.now(UTC)
        try:
            plan = self._decide(job, self._cache.observed(key), self._settings, now)
        except Exception as error:  # what the API server took, and nobody here foresaw
            LOG.exception("%s cannot be decided", "/".join(key))
            status, events = undecided(job, error, now)
            plan = Plan(status=status, events=tuple(events), requeue_seconds=UNDECIDED_SECONDS)
        try:
            learned = await self._carry_out(key, job, plan, now)
        except Conflict:
            return Looked(failed=True)  # the watch tells what somebody else wrote
        except (ClusterUnavailable, LeadershipLost) as error:
            LOG.warning("%s: %s", "/".join(key), error)
            if isinstance(error, ClusterRefused):  # such a status: it has another that says so
                await self._write_status(key, job, undecided(job, error, now)[0], now)
            return Looked(failed=True)
        return Looked(0.0 if learned else plan.requeue_seconds, None if plan.is_quiet else _deeds(plan))

    async def _carry_out(self, key: Key, job: JobView, plan: Plan, now: datetime) -> bool:
        """In the order that `plan` asks for. Whether anything came of it that no watch will tell: look again."""
        if plan.add_finalizer:
            job = await self._set_finalizers(key, job, (*job.finalizers, names.FINALIZER))
        last = self._cache.status_written(key)
        if not plan.is_quiet or is_worth_writing(job.status, plan.status, last, now):
            await self._write_status(key, job, plan.status, now)
        for event in plan.events:
            await self._say(job, event)
        await in_parallel([self._delete(key, each) for each in plan.delete])
        learned = await self._apply(key, plan.apply, now)
        for run in plan.purge:
            if await self._purge(job.name, run):
                self._cache.purged(key, run)
                learned = True
        if plan.remove_finalizer and (current := self._cache.job(key)) is not None:
            left = tuple(each for each in current.finalizers if each != names.FINALIZER)
            await self._set_finalizers(key, current, left)
        return learned

    async def _set_finalizers(self, key: Key, job: JobView, finalizers: tuple[str, ...]) -> JobView:
        metadata = {"uid": job.uid, "resourceVersion": job.resource_version, "finalizers": list(finalizers)}
        answer = await self._api.merge(JOB_VERSION, names.KIND, *key, {"metadata": metadata})
        return self._job_after(key, job, answer)

    async def _write_status(self, key: Key, job: JobView, status: dict[str, Any], now: datetime) -> None:
        if status != job.status:
            answer = await self._api.write_status(job.namespace, job.name, job.uid, job.resource_version, status)
            self._job_after(key, job, answer)
            self._cache.wrote_status(key, now)

    def _job_after(self, key: Key, job: JobView, answer: Answer) -> JobView:
        if answer.code in (404, 409):
            raise Conflict
        if answer.is_refused:
            raise ClusterRefused(f"write of {'/'.join(key)}", answer.message)
        self._cache.put_job(answer.body)
        return self._cache.job(key) or job

    async def _say(self, job: JobView, event: Event) -> None:
        answer = await self._events.say(job, event)
        if answer is not None and answer.is_refused:
            LOG.warning("an event of %s/%s was refused: %s", job.namespace, job.name, answer.message)

    async def _delete(self, key: Key, asked: Delete) -> Answer:
        answer = await self._api.delete(
            "v1", asked.kind, key[0], asked.name, uid=asked.uid, grace_seconds=asked.grace_seconds
        )
        if answer.is_missing:
            self._cache.remove_pod({"metadata": {"uid": asked.uid}})
        elif not answer.is_refused:
            LOG.info("%s: deleted %s %s", "/".join(key), asked.kind, asked.name)
            if answer.body.get("kind") == "Pod" and "deletionTimestamp" in answer.body["metadata"]:
                self._cache.put_pod(answer.body)
        elif answer.code != 409:  # 409: another object by now
            raise ClusterUnavailable(f"deletion of {asked.name}", answer.message)
        return answer

    async def _apply(self, key: Key, things: tuple[dict[str, Any], ...], now: datetime) -> bool:
        """Kind by kind: what the pods mount is there before they are."""
        learned = False
        for kind, group in groupby(things, key=lambda thing: str(thing["kind"])):
            asked = list(group)
            answers = await in_parallel([self._api.apply(thing) for thing in asked])
            for thing, answer in zip(asked, answers, strict=True):
                learned |= self._applied(key, kind, thing["metadata"]["name"], answer, now)
            if any(answer.is_refused for answer in answers):
                break
        return learned

    def _applied(self, key: Key, kind: str, name: str, answer: Answer, now: datetime) -> bool:
        if answer.is_refused:
            reason = str(answer.body.get("reason") or answer.code)
            LOG.warning("%s: %s %s is refused: %s", "/".join(key), kind, name, answer.message)
            return self._cache.refused(key, Refusal(kind, name, reason, answer.message, now))
        LOG.info("%s: applied %s %s", "/".join(key), kind, name)
        if kind == "Pod":
            self._cache.put_pod(answer.body)
        return self._cache.accepted(key, kind, name)


def _deeds(plan: Plan) -> object:
    """What two plans that do the same have in common."""
    applied = [(thing["kind"], thing["metadata"]["name"]) for thing in plan.apply]
    return (applied, plan.delete, plan.purge, plan.add_finalizer, plan.remove_finalizer)

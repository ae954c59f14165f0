"""Synchronous client of the cluster in the user's kubeconfig."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from rlhfspec.cluster import names
from rlhfspec.cluster.access import KubeAccess
from rlhfspec.cluster.api import JOB_VERSION, Api, ApiResponse
from rlhfspec.errors import ClusterUnavailable, InvalidRequest, did_you_mean
from rlhfspec.plugin.pods import is_running, name_of

T = TypeVar("T")
Json = dict[str, Any]
_AGENT = "kubectl-rlhf"
_EXEC_SECONDS = 60.0
_SHOW = ("python", "-m", "rlhfspec.control.show")
_NO_SUCH_KIND = ("could not find the requested resource", "404 page not found")


@dataclass(frozen=True, slots=True)
class Where:
    """Options of the command line; None means from the kubeconfig."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None


class Cluster:
    """Namespace of a cluster, with requests that are never retried."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._access = KubeAccess(where.kubeconfig, where.context)
        self.namespace = where.namespace or self._access.namespace

    def __enter__(self) -> Self:
        self._calls = _Calls()
        self._api = self._calls.result(Api(self._access, agent=_AGENT, deadline_seconds=0.0).__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._calls.result(self._api.__aexit__(kind, error, at))
        self._calls.close()

    def jobs(self) -> list[Json]:
        return self._list(names.PLURAL, JOB_VERSION, names.KIND)

    def job(self, name: str) -> Json:
        try:
            return self._asked(f"rlhfjob {name}", self._api.get(JOB_VERSION, names.KIND, self.namespace, name))
        except _Missing:
            there = [job["metadata"]["name"] for job in self.jobs()]
            problem = f"does not exist in namespace {self.namespace}"
            raise InvalidRequest("JOB", name, problem + (did_you_mean(name, there) or _listed(there))) from None

    def change_job(self, name: str, patch: Json) -> Json:
        self.job(name)
        change = self._api.merge(JOB_VERSION, names.KIND, self.namespace, name, patch)
        return self._asked(f"change of {name}", change)

    def pods(self, job: str, role: str | None = None) -> list[Json]:
        selector = f"{names.JOB}={job}" + (f",{names.ROLE}={role}" if role else "")
        return sorted(self._list("pods", "v1", "Pod", labels=selector), key=_order)

    def pod(self, name: str) -> Json | None:
        try:
            return self._asked(f"pod {name}", self._api.get("v1", "Pod", self.namespace, name))
        except _Missing:
            return None

    def create_pod(self, pod: Json) -> Json:
        return self._asked("a pod", self._api.create(pod))

    def delete_pod(self, name: str) -> None:
        deletion = self._api.delete("v1", "Pod", self.namespace, name, uid=None, grace_seconds=0)
        with suppress(_Missing):
            self._asked(f"deletion of {name}", deletion)

    def evict(self, name: str) -> None:
        """Evict a pod, unless a PodDisruptionBudget forbids it."""
        self._asked(f"eviction of {name}", self._api.evict(self.namespace, name))

    def warnings(self, names_: set[str]) -> list[Json]:
        """Return warning events about objects of these names, newest last."""
        events = self._list("events", "v1", "Event", fields="type=Warning")
        mine = [event for event in events if event["involvedObject"].get("name") in names_]
        return sorted(mine, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")

    def log(self, pod: str, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        """Yield the log's lines, each with a leading timestamp."""
        rest = b""
        for chunk in self._calls.each(self._api.log(self.namespace, pod, names.CONTAINER, follow=follow, tail=tail)):
            *whole, rest = (rest + chunk).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
        if rest:
            yield rest.decode(errors="replace")

    def kubectl(self, *words: str) -> list[str]:
        """Return a kubectl command line for the same cluster and namespace."""
        program = shutil.which("kubectl")
        if program is None:
            raise InvalidRequest("kubectl", None, "is not on the PATH, and this command needs it")
        where = self._where
        options = ["--namespace", self.namespace]
        options += ["--context", where.context] if where.context else []
        options += ["--kubeconfig", where.kubeconfig] if where.kubeconfig else []
        return [program, *options, *words]

    def exec(self, pod: str, *words: str) -> list[str]:
        """Return the command line that runs a program in a pod."""
        return self.kubectl("exec", pod, "-c", names.CONTAINER, "--", *words)

    # --- queries run in the pod of the job's control, which has credentials and run folder ----------------------------

    def view_command(self, job: str) -> list[str]:
        return self.kubectl("exec", "-it", self._control(job), "-c", names.CONTAINER, "--", *_SHOW, "--view")

    def ask_control(self, job: str, *options: str) -> Any:
        """Return the parsed JSON output of `rlhfspec.control.show` in the control pod."""
        command = self.exec(self._control(job), *_SHOW, *options)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_EXEC_SECONDS)
        except subprocess.TimeoutExpired:
            raise ClusterUnavailable(f"the state of {job}", f"no answer within {_EXEC_SECONDS:g} s") from None
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line and "command terminated" not in line]
            raise ClusterUnavailable(f"the state of {job}", said[-1] if said else f"exit code {done.returncode}")
        return json.loads(done.stdout)

    def _control(self, job: str) -> str:
        phase = (self.job(job).get("status") or {}).get("phase", "Pending")
        for pod in self.pods(job, names.CONTROL):
            if is_running(pod):
                return name_of(pod)
        raise InvalidRequest("JOB", job, f"its control pod is not running: the job is {phase}")

    def _asked(self, asked: str, call: Awaitable[ApiResponse]) -> Json:
        try:
            answer = self._calls.result(call)
        except ClusterUnavailable as error:
            raise ClusterUnavailable(asked, error.problem) from None
        if answer.is_refused:
            raise _refusal(asked, answer.message, is_missing=answer.is_missing)
        return answer.body

    def _list(self, asked: str, version: str, kind: str, *, labels: str = "", fields: str = "") -> list[Json]:
        try:
            return list(self._calls.each(self._api.list(version, kind, self.namespace, labels=labels, fields=fields)))
        except ClusterUnavailable as error:
            raise _refusal(asked, error.problem) from None


class _Calls:
    """Event loop in its own thread, for synchronous callers."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="calls", daemon=True)
        self._thread.start()

    def result(self, call: Awaitable[T]) -> T:
        async def awaited() -> T:
            return await call

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result()

    def each(self, found: AsyncIterator[T]) -> Iterator[T]:
        while True:
            try:
                each = self.result(anext(found))
            except (StopAsyncIteration, CancelledError):
                return
            yield each

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._loop.shutdown_asyncgens()


class _Missing(ClusterUnavailable):
    """Raised when the API server answers 404."""


def _refusal(asked: str, said: str, *, is_missing: bool = False) -> ClusterUnavailable:
    if names.PLURAL[:-1] in asked and any(each in said for each in _NO_SUCH_KIND):
        return ClusterUnavailable(asked, "there is no kind RLHFJob: install the chart first")
    return _Missing(asked, said) if is_missing else ClusterUnavailable(asked, said)


def _order(pod: Json) -> tuple[int, int]:
    labels = pod["metadata"].get("labels") or {}
    role, worker = labels.get(names.ROLE, ""), labels.get(names.WORKER, "")
    place = names.ROLES.index(role) if role in names.ROLES else len(names.ROLES)
    return place, int(worker) if worker.isdecimal() else 0


def _listed(there: list[str]) -> str:
    return f"; existing jobs: {', '.join(sorted(there)[:10])}" if there else "; there are no jobs"

"""Another tenant, who minds its own business: its jobs begin one after the other while something happens elsewhere.

How late each begins, from its creation to the pod of its `prepare`, is the API server's own say, in its audit log,
without the time that it took itself to answer what was asked for that job, and without the time that the operator
waited for a processor: on a machine with too much to do, these are most of it, and no tenant's doing.

    >>> from datetime import UTC, timedelta
    >>> def answered(verb, kind, name, since, until, code=201):
    ...     at = [(datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=each)).isoformat() for each in (since, until)]
    ...     about = {"resource": kind, "namespace": "calm", "name": name}
    ...     return {"verb": verb, "objectRef": about, "responseStatus": {"code": code},
    ...         "requestReceivedTimestamp": at[0], "stageTimestamp": at[1]}
    >>> delays([answered("create", "rlhfjobs", "a", 0, 1), answered("patch", "configmaps", "a-b", 1.2, 2.2),
    ...     answered("patch", "pods", "a-prepare-0", 2.5, 3.5)], "calm")
    {'a': 0.5}
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from operators import Operator, World, example, until

from rlhfspec.cluster import names

ALLOWED_SECONDS = 1.0  # by which nobody else's doing delays a job


def delays(audit: Iterable[Mapping[str, Any]], namespace: str) -> dict[str, float]:
    """By job, in seconds."""
    asked: dict[str, list[tuple[float, float]]] = {}  # from when to when the API server was at it, by job
    found: dict[str, float] = {}
    for entry in audit:
        about = entry.get("objectRef", {})
        if about.get("namespace") != namespace or entry["verb"] not in ("create", "patch"):
            continue
        name = about.get("name", "")
        began, ended = (_seconds(entry[field]) for field in ("requestReceivedTimestamp", "stageTimestamp"))
        if about["resource"] == names.PLURAL and entry["responseStatus"]["code"] == 201:
            asked[name] = [(began, ended)]
        elif (job := _job_of(name)) in asked and job not in found:
            asked[job].append((began, ended))
            if about["resource"] == "pods" and entry["responseStatus"]["code"] == 201:
                found[job] = round(_idle_seconds(asked[job]), 6)
    return found


def _job_of(name: str) -> str:
    """
    >>> {_job_of(name) for name in ("probe4", "probe4-prepare-0", "probe4-connections-3a9d33b1", "probe4.3a9d")}
    {'probe4'}
    """
    return re.split(r"[.-]", name)[0]


def _idle_seconds(intervals: list[tuple[float, float]]) -> float:
    """Between them, from the first to the last."""
    idle, until = 0.0, intervals[0][1]
    for began, ended in sorted(intervals):
        idle, until = idle + max(began - until, 0.0), max(until, ended)
    return idle


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


class Calm:
    """Its jobs in one namespace. `baseline`: how long they took while nothing else happened, the longest."""

    def __init__(self, world: World, operator: Operator, namespace: str) -> None:
        self.world, self.operator, self.namespace = world, operator, namespace
        self._num = 0
        self._waiting: dict[str, float] = {}  # seconds of the operator, by job
        self.baseline = max(self.begin(8).values())

    def begin(self, num: int) -> dict[str, float]:
        """So many jobs, one after the other: the delay of each."""
        return self._delays([self._one() for _ in range(num)], 0)

    def _delays(self, jobs: Iterable[str], since: int) -> dict[str, float]:
        measured = delays(self.world.kubernetes.audit(self.namespace, since=since), self.namespace)
        return {name: max(measured[name] - self._waiting[name], 0.0) for name in jobs}

    def _one(self) -> str:
        name, self._num = f"probe{self._num}", self._num + 1
        place = (names.GROUP, names.VERSION, self.namespace, names.PLURAL)
        waiting = self.operator.waiting_seconds
        self.world.jobs.create_namespaced_custom_object(*place, example(name))
        until(
            lambda: names.pod_name(name, names.PREPARE, 0) in self.world.pods(self.namespace),
            f"{self.namespace}/{name} begins",
        )
        self._waiting[name] = self.operator.waiting_seconds - waiting
        self.world.jobs.delete_namespaced_custom_object(*place, name)
        return name

    @contextmanager
    def goes_on(self) -> Iterator[None]:
        """Check that all the while jobs begin about as soon as they did while nothing else happened."""
        stop, problems = threading.Event(), list[BaseException]()

        def keep() -> None:
            try:
                while not stop.is_set():
                    self._one()
                    stop.wait(0.2)
            except BaseException as error:
                problems.append(error)

        kubernetes = self.world.kubernetes
        first, since, thread = self._num, kubernetes.audit_bytes(), threading.Thread(target=keep)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        assert not problems, problems
        during = self._delays((f"probe{each}" for each in range(first, self._num)), since)
        assert during, "no job began meanwhile"
        print(f"{len(during)} jobs began within {max(during.values()):.2f} s, {self.baseline:.2f} s before")
        late = {name: seconds for name, seconds in during.items() if seconds > self.baseline + ALLOWED_SECONDS}
        assert not late, f"another's doings delayed {late}; before it took {self.baseline:.2f} s"

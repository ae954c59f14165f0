"""`kubectl rlhf logs`: readable logs of all pods, merged by time, optionally of one sample.

Example:
    >>> said = '{"level": "warning", "message": "slow", "sample": "sums/3/7/1"}'
    >>> line = parsed(f"2026-01-01T00:00:00.5Z {said}", "reward-0")
    >>> line.as_text().plain
    '00:00:00.500  reward-0      warning  slow  [sums/3/7/1]'
    >>> line.is_about("sums/3/7"), line.is_about("sums/3/70")
    (True, False)
"""

from __future__ import annotations

import heapq
import json
import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from rlhfspec.errors import RLHFSpecError
from rlhfspec.plugin.output import shown
from rlhfspec.plugin.pods import name_of, worker_of

if TYPE_CHECKING:
    from rlhfspec.plugin.cluster import Cluster

_POLL_PODS_SECONDS = 2.0  # interval of the search for new pods
_ENDED_PHASES = ("Succeeded", "Failed")
_LEVEL_COLOURS = {"warning": "yellow", "error": "red", "critical": "red"}


@dataclass(frozen=True, slots=True, order=True)
class Line:
    """Log line, ordered by the kubelet's timestamp."""

    time: str
    worker: str
    level: str = ""
    message: str = ""
    sample: str = ""

    def is_about(self, sample: str) -> bool:
        """Return whether a line is about a sample, its prompt or its parts."""
        if not self.sample:
            return sample in self.message
        one, other = f"{self.sample}/", f"{sample}/"
        return one.startswith(other) or other.startswith(one)

    def as_text(self) -> Text:
        clock = self.time.partition("T")[2].rstrip("Z")
        seconds, _, fraction = clock.partition(".")
        text = Text(shown(f"{seconds}.{fraction[:3]:0<3}  {self.worker:<12}  "))
        said = f"{self.level:<7}  {self.message}" if self.level else self.message
        text.append(shown(said), style=_LEVEL_COLOURS.get(self.level))
        return text.append(shown(f"  [{self.sample}]"), style="dim") if self.sample else text


def parsed(line: str, worker: str) -> Line:
    """Parse a log line, keeping text that is not JSON."""
    time, _, text = line.partition(" ")
    try:
        said = json.loads(text)
        level, message = str(said["level"]), str(said["message"])
    except (ValueError, KeyError, TypeError):
        return Line(time, worker, message=text.rstrip())
    error = f": {said['error']}" if said.get("error") else ""
    return Line(time, worker, level, message + error, str(said.get("sample", "")))


def lines(
    cluster: Cluster,
    job: str,
    *,
    role: str | None = None,
    sample: str | None = None,
    tail: int | None = None,
    trace: Iterable[Line] = (),
) -> Iterator[Line]:
    """Yield log lines of existing pods and of `trace`, ordered by time."""
    logs = [_of_pod(cluster, name_of(pod), worker_of(pod), tail) for pod in cluster.pods(job, role) if _has_log(pod)]
    traced = sorted(line for line in trace if role is None or line.worker.rpartition("-")[0] == role)
    for line in heapq.merge(*logs, traced):
        if sample is None or line.is_about(sample):
            yield line


def trace_of(cluster: Cluster, job: str, sample: str) -> tuple[list[Line], str]:
    """Return a sample's trace as lines, and a text why there is none."""
    try:
        return [Line(**each) for each in cluster.ask_control(job, "--sample", sample)], ""
    except RLHFSpecError as error:
        return [], str(error)


def followed(cluster: Cluster, job: str, *, role: str | None = None, sample: str | None = None) -> Iterator[Line]:
    """Yield lines as they come, until the job is over."""
    told: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
    threads: dict[str, threading.Thread] = {}  # by pod uid
    while True:
        is_over = (cluster.job(job).get("status") or {}).get("phase") in _ENDED_PHASES
        for pod in cluster.pods(job, role):
            if _has_log(pod) and (uid := pod["metadata"]["uid"]) not in threads:
                words = (cluster, name_of(pod), worker_of(pod), told)
                threads[uid] = threading.Thread(target=_follow, args=words, daemon=True)
                threads[uid].start()
        yield from _until_quiet(told, sample)
        if is_over and told.empty() and not any(thread.is_alive() for thread in threads.values()):
            return


def _until_quiet(told: queue.SimpleQueue[Line | None], sample: str | None) -> Iterator[Line]:
    while True:
        try:
            line = told.get(timeout=_POLL_PODS_SECONDS)
        except queue.Empty:
            return
        if line is None:
            return
        if sample is None or line.is_about(sample):
            yield line


def _follow(cluster: Cluster, pod: str, worker: str, told: queue.SimpleQueue[Line | None]) -> None:
    try:
        for line in cluster.log(pod, follow=True):
            told.put(parsed(line, worker))
    except RLHFSpecError as error:  # the pod was deleted meanwhile
        told.put(Line("", worker, "warning", str(error)))
    told.put(None)  # look for a successor


def _of_pod(cluster: Cluster, pod: str, worker: str, tail: int | None) -> Iterator[Line]:
    last = ""
    for text in cluster.log(pod, tail=tail):
        line = parsed(text, worker)
        last = max(last, line.time)
        yield Line(last, line.worker, line.level, line.message, line.sample)


def _has_log(pod: dict[str, object]) -> bool:
    status = pod.get("status")
    assert isinstance(status, dict)
    return any(
        (each.get("state") or {}).keys() & {"running", "terminated"} for each in status.get("containerStatuses") or ()
    )

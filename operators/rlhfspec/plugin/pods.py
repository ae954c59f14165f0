"""State of a pod as table cells.

Example:
    >>> pod = {"metadata": {"name": "sums-reward-0", "labels": {"rlhfspec.io/role": "reward"}}, "spec": {},
    ...        "status": {"phase": "Pending", "containerStatuses": [{"name": "worker", "restartCount": 0,
    ...        "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}]}}
    >>> state_of(pod), role_of(pod)
    (PodState(word='ErrImagePull', detail='not found', is_well=False), 'reward')
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rlhfspec.cluster import names

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PodState:
    """State of a pod: a word as in kubectl, and one line of evidence."""

    word: str
    detail: str = ""
    is_well: bool = True


def name_of(thing: Json) -> str:
    return str(thing["metadata"]["name"])


def role_of(pod: Json) -> str:
    return str((pod["metadata"].get("labels") or {}).get(names.ROLE, ""))


def worker_of(pod: Json) -> str:
    """Return the worker's name, such as generator-2."""
    return f"{role_of(pod)}-{(pod['metadata'].get('labels') or {}).get(names.WORKER, '0')}"


def node_of(pod: Json) -> str:
    return str(pod["spec"].get("nodeName") or "")


def is_running(pod: Json) -> bool:
    return bool(pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"])


def state_of(pod: Json) -> PodState:
    """Return the state that keeps a pod from being ready, else Ready or its phase."""
    status = pod.get("status") or {}
    phase = status.get("phase", "Pending")
    if "deletionTimestamp" in pod["metadata"]:
        return PodState("Terminating")
    if status.get("reason"):  # reason of the whole pod: Evicted, NodeLost, ...
        return PodState(status["reason"], _line(status.get("message")), is_well=False)
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return PodState(scheduled.get("reason", "Unschedulable"), _line(scheduled.get("message")), is_well=False)
    return _of_containers(status, phase) or PodState("Ready" if _is_ready(conditions) else phase)


def _of_containers(status: Json, phase: str) -> PodState | None:
    for container in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        state = container.get("state") or {}
        waiting, ended = state.get("waiting"), state.get("terminated")
        if waiting and waiting.get("reason") not in ("PodInitializing", "ContainerCreating", None):
            return PodState(waiting["reason"], _line(waiting.get("message")), is_well=False)
        if ended and ended.get("exitCode"):
            word = ended.get("reason") or "Error"
            code = f"exit code {ended['exitCode']}"
            said = last_line(ended.get("message") or "")
            return PodState(word, f"{code}: {said}" if said else code, is_well=False)
        if ended and phase == "Succeeded":
            return PodState("Completed", last_line(ended.get("message") or ""))
    return None


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def condition_of(job: Json, kind: str) -> Json:
    conditions = (job.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each["type"] == kind), {})


def age(since: str | None, now: datetime | None = None) -> str:
    """Return the time since a timestamp as text.

    >>> age("2026-01-01T00:00:00Z", datetime(2026, 1, 1, 3, 4, tzinfo=UTC))
    '3h4m'
    """
    if not since:
        return ""
    then = datetime.fromisoformat(since)
    return duration(((now or datetime.now(UTC)) - then).total_seconds())


def duration(seconds: float) -> str:
    """Return seconds in the two largest units.

    >>> duration(42.4), duration(90061), duration(-3)
    ('42s', '1d1h', '0s')
    """
    left, parts = max(int(seconds), 0), list[str]()
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts[:2]) or "0s"


def _is_ready(conditions: Mapping[str, Json]) -> bool:
    return bool(conditions.get("Ready", {}).get("status") == "True")


def _line(text: str | None) -> str:
    return " ".join((text or "").split())

"""Where the dashboard's jobs come from: `laptop` (folders of runs) or `cluster` (the API server). Both only read.

A source says which jobs there are and where a job's run can be looked at; what a run says itself (its folder, Redis,
NATS) is the same in both, and read by `feed`.

Example:
    >>> key = JobKey(namespace="team-a", name="sums")
    >>> str(key)
    'team-a/sums'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, order=True)
class JobKey:
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHead:
    """A row of the list. Times are Unix seconds; None: not known (yet)."""

    namespace: str
    name: str
    phase: str
    algorithm: str = ""
    model: str = ""
    step: int = 0
    total_steps: int = 0
    reward: float | None = None
    kl: float | None = None
    tokens_per_second: float | None = None
    accepted_per_verification: float | None = None
    eta_seconds: float | None = None
    generators: int = 0
    gpus: int = 0
    restarts: int = 0
    created: float | None = None
    started: float | None = None
    ended: float | None = None
    message: str = ""  # why it is in this phase

    @property
    def key(self) -> JobKey:
        return JobKey(self.namespace, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    type: str
    status: str  # True, False, Unknown
    reason: str = ""
    message: str = ""
    since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    name: str
    role: str
    worker: str
    phase: str
    ready: bool
    node: str = ""
    restarts: int = 0
    since: float | None = None
    message: str = ""  # of Kubernetes: why it waits, how it ended


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolderInfo:
    """Where it lies: on this machine, on a claim, or in an object store, whose `place` is a URI. `fetch`: the command
    that brings it here."""

    path: str = ""
    place: str = ""
    fetch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDetail:
    """`last_words`: of pods, by name, what their processes said last. That is the end of a log, and not for all."""

    head: JobHead
    run: str = ""  # uid of the run that goes on, or was the last
    folder: RunFolderInfo = RunFolderInfo()
    last_words: Mapping[str, str] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    pods: tuple[Pod, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a run that goes on can be listened to. `role`: whose credentials lie in the folder."""

    job: str
    uid: str
    nats_url: str | None = None
    redis_url: str | None = None
    credentials: Path | None = None
    role: str = "view"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """What there is to look at of a job's run: its folder, if it can be reached from here; the address of what speaks
    of it now."""

    folder: Path | None = None
    address: Address | None = None


class JobSource(Protocol):
    """Cheap to ask every second: what costs is kept for a moment. `errors.InvalidRequest` for a job that is not
    there, ClusterUnavailable where the API server does not answer."""

    async def jobs(self) -> Sequence[JobHead]: ...

    async def job(self, key: JobKey) -> JobDetail: ...

    async def manifest(self, key: JobKey) -> dict[str, Any]:
        """The whole job, as its user wrote it and as it is."""
        ...

    async def place(self, key: JobKey) -> RunPlace: ...

    async def close(self) -> None: ...

"""Read-only sources of the dashboard's jobs: `laptop` (run folders) or `cluster` (the API server).

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
    """Row of the job list. Times are Unix seconds; None: not known yet."""

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
    message: str = ""  # from Kubernetes: why it waits or how it ended


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolderInfo:
    """Location of a run folder. `place`: URI, claim or machine; `fetch`: command that downloads it."""

    path: str = ""
    place: str = ""
    fetch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDetail:
    """Details of a job. `last_words`: last log lines of terminated pods, for users who may read logs."""

    head: JobHead
    run: str = ""  # uid of the current or last run
    folder: RunFolderInfo = RunFolderInfo()
    last_words: Mapping[str, str] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    pods: tuple[Pod, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of a run's live signals. `role`: owner of the credentials."""

    job: str
    uid: str
    nats_url: str | None = None
    redis_url: str | None = None
    credentials: Path | None = None
    role: str = "view"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """Folder of a run, if reachable, and address of its live signals."""

    folder: Path | None = None
    address: Address | None = None


class JobSource(Protocol):
    """Source of jobs, cheap to poll. Raises InvalidRequest for an unknown job, else ClusterUnavailable."""

    async def jobs(self) -> Sequence[JobHead]: ...

    async def job(self, key: JobKey) -> JobDetail: ...

    async def manifest(self, key: JobKey) -> dict[str, Any]: ...

    async def place(self, key: JobKey) -> RunPlace: ...

    async def close(self) -> None: ...

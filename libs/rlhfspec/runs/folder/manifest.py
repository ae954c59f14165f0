"""`manifest.json`: the job, versions, machine, times and outcome of a run."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

RunOutcome = Literal["running", "completed", "stopped", "failed"]
PACKAGES = (
    "rlhfspec", "torch", "transformers", "tokenizers", "safetensors", "peft", "datasets", "pyarrow", "numpy",
    "pydantic", "protobuf",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    cpu: str
    num_cores: int  # available to this process
    num_threads: int  # torch threads
    memory_bytes: int
    gpu: str | None
    system: str
    python: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    at: str
    step: int | None = None  # the last kept step; None: the run ended before it continued
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # (old, new) of fields that change the curve


@dataclass(frozen=True, slots=True, kw_only=True)
class RunManifest:
    """Description of a run in UTC times (ISO 8601); a killed run stays "running"."""

    job: str
    versions: dict[str, str]
    machine: Machine
    started: str
    models: dict[str, dict[str, Any]] = field(default_factory=dict)  # by role: verification at load
    processes: dict[str, int] = field(default_factory=dict)  # by stage; empty: all stages in one process
    resumed: tuple[Resumption, ...] = ()
    finished: str | None = None
    outcome: RunOutcome = "running"
    reason: str = ""
    num_steps: int = 0
    exported: str = ""  # which checkpoint is in export/, and why

    @classmethod
    def begin(cls, job: str) -> RunManifest:
        return cls(job=job, versions=versions(), machine=machine(), started=now())

    def resume(self, changed: dict[str, tuple[Any, Any]]) -> RunManifest:
        again = Resumption(at=now(), changed=changed)
        return replace(RunManifest.begin(self.job), started=self.started, resumed=(*self.resumed, again))

    def going_on_after(self, step: int) -> RunManifest:
        resumed = tuple(replace(each, step=step) if each.step is None else each for each in self.resumed)
        return replace(self, resumed=resumed, num_steps=step, outcome="running", finished=None, reason="")

    def end(self, outcome: RunOutcome, reason: str, *, num_steps: int) -> RunManifest:
        return replace(self, finished=now(), outcome=outcome, reason=reason, num_steps=num_steps)

    @classmethod
    def from_content(cls, content: dict[str, Any]) -> RunManifest:
        resumed = tuple(Resumption(**entry) for entry in content["resumed"])
        resumed = tuple(replace(each, changed={path: tuple(v) for path, v in each.changed.items()}) for each in resumed)
        return cls(**(content | {"resumed": resumed, "machine": Machine(**content["machine"])}))


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> Machine:
    num_threads, gpu = _torch()
    return Machine(
        cpu=_cpu_name(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_threads=num_threads,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpu=gpu,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
    )


def _torch() -> tuple[int, str | None]:
    """Return torch's thread count and GPU name, or 1 and None if torch is not imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return 1, None
    return torch.get_num_threads(), torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    name = fields.get("model name") or platform.processor() or platform.machine()
    return f"{name} (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else name

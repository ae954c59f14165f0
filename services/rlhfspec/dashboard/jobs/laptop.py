"""Jobs from run folders on this machine. A killed run has the phase Interrupted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from rlhfspec.dashboard.jobs.folder import PLACE_OF, NewLines, Row, row_of
from rlhfspec.dashboard.jobs.source import Address, Condition, JobDetail, JobHead, JobKey, RunFolderInfo, RunPlace
from rlhfspec.errors import InvalidRequest
from rlhfspec.messages.access.connections import Connections
from rlhfspec.stage.threads import ComputeThread

NAMESPACE = "laptop"
_ROLE = "view"
_OUTCOME_PHASES = {"running": "Running", "completed": "Succeeded", "stopped": "Suspended", "failed": "Failed"}


class LaptopSource:
    """Job source of `folders`, which need not exist yet."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._runs = {name: _Run(name, folder) for name, folder in _named(folders).items()}
        self._thread = ComputeThread("runs")

    async def jobs(self) -> Sequence[JobHead]:
        details = await self._thread.in_thread(lambda: [run.detail() for run in self._runs.values()])
        return [detail.head for detail in details]

    async def job(self, key: JobKey) -> JobDetail:
        return await self._thread.in_thread(self._run(key).detail)

    async def manifest(self, key: JobKey) -> dict[str, Any]:
        return await self._thread.in_thread(self._run(key).manifest)

    async def place(self, key: JobKey) -> RunPlace:
        return await self._thread.in_thread(self._run(key).place)

    async def close(self) -> None:
        self._thread.close()

    def _run(self, key: JobKey) -> _Run:
        if key.namespace != NAMESPACE or key.name not in self._runs:
            raise InvalidRequest("job", str(key), "is not one of the runs shown here")
        return self._runs[key.name]


def _named(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the folders by unique job name.

    >>> _named([Path("a/out"), Path("b/out"), Path("c")])
    {'out': PosixPath('a/out'), 'out-2': PosixPath('b/out'), 'c': PosixPath('c')}
    """
    found: dict[str, Path] = {}
    for folder in folders:
        base = folder.absolute().name or "run"
        names = (base, *(f"{base}-{number}" for number in range(2, len(folders) + 1)))
        found[next(name for name in names if name not in found)] = folder
    return found


class _Run:
    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder
        self._steps = NewLines(folder / "steps.jsonl")
        self._last: Row | None = None

    def place(self) -> RunPlace:
        return RunPlace(folder=self._folder, address=self._address())

    def detail(self) -> JobDetail:
        job, manifest, address = self.manifest(), self._json("manifest.json"), self._address()
        head = self._head(_under(job, "spec"), manifest)
        if head.phase == "Running" and manifest.get("processes") and address is None:
            head = replace(head, phase="Interrupted", message="its processes ended unexpectedly; --resume continues")
        return JobDetail(
            head=head,
            run=address.uid if address else "",
            folder=RunFolderInfo(path=str(self._folder.absolute()), place="this machine"),
            conditions=_conditions(head, manifest),
        )

    def _head(self, spec: dict[str, Any], manifest: dict[str, Any]) -> JobHead:
        row = self._last_row()
        training, roles = _under(spec, "training"), _under(spec, "roles")
        step, total = int(_of(row, "step") or 0), training.get("steps")
        total_steps = total if isinstance(total, int) else 0
        running = _OUTCOME_PHASES.get(str(manifest.get("outcome")), "Pending")
        seconds = _of(row, "seconds")
        return JobHead(
            namespace=NAMESPACE,
            name=self._name,
            phase=running,
            algorithm=str(_under(spec, "algorithm").get("name", "")),
            model=str(_under(spec, "model").get("path", "")),
            step=step,
            total_steps=total_steps,
            reward=_of(row, "reward"),
            kl=_of(row, "kl"),
            tokens_per_second=_of(row, "tokens_per_second"),
            accepted_per_verification=_of(row, "accepted"),
            eta_seconds=seconds * max(total_steps - step, 0) if seconds and running == "Running" else None,
            generators=int(_under(roles, "generator").get("workers", 1)),
            restarts=len(manifest.get("resumed") or ()),
            created=_unix(manifest.get("started")),
            started=_unix(manifest.get("started")),
            ended=_unix(manifest.get("finished")),
            message=" ".join(str(manifest.get("reason") or "").split())[:500],
        )

    def _last_row(self) -> Row | None:
        restarts = self._steps.num_restarts
        for _, line in self._steps.read():
            if (row := row_of(line)) is not None:
                self._last = row
                restarts = self._steps.num_restarts
        if self._steps.num_restarts != restarts:
            self._last = None
        return self._last

    def _address(self) -> Address | None:
        path = self._folder / "processes" / "connections.json"
        if not path.exists():
            return None
        try:
            connections = Connections.read(path)
            job = connections.job()
        except InvalidRequest:
            return None  # being written or removed
        return Address(
            job=job.metadata.name,
            uid=connections.uid,
            nats_url=connections.nats_url,
            redis_url=connections.redis_url,
            credentials=connections.credentials,
            role=_ROLE,
        )

    def manifest(self) -> dict[str, Any]:
        with suppress(OSError, yaml.YAMLError, ValueError):
            content = yaml.safe_load((self._folder / "job.yaml").read_text())
            return content if isinstance(content, dict) else {}
        return {}

    def _json(self, name: str) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            content = json.loads((self._folder / name).read_text())
            return content if isinstance(content, dict) else {}
        return {}


def _conditions(head: JobHead, manifest: dict[str, Any]) -> tuple[Condition, ...]:
    """Return the run's conditions in the form of a cluster's job."""
    running = head.phase == "Running"
    found = [Condition(type="Running", status=str(running), since=head.started)]
    if head.ended is not None:
        found.append(Condition(type=head.phase, status="True", reason="", message=head.message, since=head.ended))
    elif head.phase == "Interrupted":
        found.append(Condition(type="Healthy", status="False", reason="Interrupted", message=head.message))
    for resumed in manifest.get("resumed") or ():
        if isinstance(resumed, dict):
            message = f"after step {resumed.get('step')}"
            found.append(Condition(type="Resumed", status="True", message=message, since=_unix(resumed.get("at"))))
    return tuple(found)


def _under(content: dict[str, Any], name: str) -> dict[str, Any]:
    found = content.get(name)
    return found if isinstance(found, dict) else {}


def _of(row: Row | None, name: str) -> float | None:
    return None if row is None else row[PLACE_OF[name]]


def _unix(text: Any) -> float | None:
    try:
        return None if text is None else datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None

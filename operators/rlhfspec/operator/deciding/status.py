"""Public status of a job, equal for equal inputs so that only changes are written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from rlhfspec.cluster import names
from rlhfspec.messages.loop import GATEWAY
from rlhfspec.operator.deciding.memory import INTERNAL, Memory, text_of, tidy
from rlhfspec.operator.deciding.observed import JobView, Said
from rlhfspec.operator.deciding.reasons import all_ready, finding
from rlhfspec.operator.deciding.situation import Event, Situation
from rlhfspec.operator.making import kueue
from rlhfspec.operator.making.pods import num_gpus

# Minimal intervals of status writes: for steps and pod counts, and for gauges such as tokens/s.
_COUNTS_SECONDS, GAUGES_SECONDS = 1.0, 5.0
COUNTS = ("step", "totalSteps", "shown", "checkpointStep")  # counts of `progress`; the rest are gauges
# Phases of a job: one word that sums up the conditions.
PHASES = {
    "Terminating": "The job was deleted, and its pods are terminating.",
    "Succeeded": "Its last step was trained.",
    "Failed": "It cannot continue; the reason says why.",
    "Suspending": "It was suspended, or evicted by Kueue. Its pods are terminating, the trainer's first, after a "
    "checkpoint.",
    "Suspended": "It is suspended. No pod of it runs.",
    "Pending": "No pod of it runs yet, or it waits for Kueue.",
    "Preparing": "`prepare` checks it and creates its run folder.",
    "Running": "All its pods have been ready, and it trains.",
    "Starting": "Its pods are starting, or the whole job restarts.",
}


def render(known: Situation) -> tuple[dict[str, Any], list[Event]]:
    """Return the new status and the events since the old one."""
    old, memory = known.job.status, known.memory
    found, phase = finding(known), phase_of(known)
    said = found or (Said(memory.outcome.reason, memory.outcome.message) if memory.outcome else Said(""))
    if phase == "Preparing" and found is None:
        shown = f"kubectl rlhf logs {known.job.name} --role prepare"
        said = Said(phase, f"fetching models and data, and creating the run folder; `{shown}` shows the progress")
    new = {
        "phase": phase,
        "observedGeneration": known.job.generation,
        "reason": said.reason,
        "message": said.message,
        "conditions": _conditions(known, phase, found),
        "roles": _roles(known),
        "generators": sum(pod.role == "generator" and pod.is_running for pod in known.pods),
        "selector": f"{names.JOB}={known.job.name},{names.ROLE}=generator",
        "gpus": _gpus(known),
        "progress": _progress(known),
        "serving": serving_of(known),
        "run": _run(known),
        "restarts": _restarts(memory),
        INTERNAL: memory.as_internal(),
    }
    times = {"startTime": memory.started, "completionTime": memory.completed}
    new |= {name: text_of(time) for name, time in times.items() if time is not None}
    new = tidy(new)
    return new, list(_events(old, new))


def undecided(job: JobView, error: Exception, now: datetime) -> tuple[dict[str, Any], list[Event]]:
    """Return the status and events of a job that the operator failed to process."""
    said = Said("OperatorError", f"{type(error).__name__}: {error}"[:900])
    before = {condition["type"]: condition for condition in job.status.get("conditions") or ()}
    healthy = _condition(job, now, "Healthy", False, said, before.get("Healthy"))
    new = {
        "phase": "Pending", **job.status, "observedGeneration": job.generation, "reason": said.reason,
        "message": said.message, "conditions": list((before | {"Healthy": healthy}).values()),
    }  # fmt: skip
    return new, list(_events(job.status, new))


def seconds_to_write(
    old: Mapping[str, Any], new: Mapping[str, Any], last_write: datetime | None, now: datetime
) -> float | None:
    """Return the seconds until the status should be written, None if unchanged."""
    if old == new:
        return None
    if last_write is None or _news(old) != _news(new):
        return 0.0
    pause = GAUGES_SECONDS if _without_gauges(old) == _without_gauges(new) else _COUNTS_SECONDS
    return max(0.0, pause - (now - last_write).total_seconds())


def _without_gauges(status: Mapping[str, Any]) -> dict[str, Any]:
    progress = status.get("progress") or {}
    return {**status, "progress": {name: progress.get(name) for name in COUNTS}}


def _news(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status without fields that change constantly."""
    internal = {name: value for name, value in (status.get(INTERNAL) or {}).items() if name != "step"}
    often = ("progress", "roles", "generators")
    return {name: value for name, value in status.items() if name not in often} | {INTERNAL: internal}


def _run(known: Situation) -> dict[str, Any]:
    if not known.memory.number:
        return {"number": 0}
    run: dict[str, Any] = {"number": known.memory.number, "uid": known.run_uid, "restartId": known.memory.restart_id}
    folder = str(known.run_folder) if known.job.job else (known.job.status.get("run") or {}).get("folder", "")
    return run | {"folder": folder}


def _restarts(memory: Memory) -> dict[str, Any]:
    """Return the restart counts; `byWorker` covers only the current run."""
    by_worker = {name: worker.restarts for name, worker in sorted(memory.workers.items()) if worker.restarts}
    return {"total": memory.total, "counted": memory.counted, "byWorker": by_worker}


def _roles(known: Situation) -> dict[str, dict[str, int]]:
    wanted = known.wanted
    roles = dict.fromkeys([*(role for role, _ in wanted), *sorted(p.role for p in known.pods if p.is_running)])
    counts = {}
    for role in roles:
        pods = [pod for pod in known.pods if pod.role == role]
        counts[role] = {
            "wanted": sum(key[0] == role for key in wanted),
            "ready": sum(pod.ready and not pod.is_deleting for pod in pods),
            "failed": sum(pod.phase == "Failed" for pod in pods),
        }
    return counts


def _gpus(known: Situation) -> int:
    return sum(num_gpus(known, role) for role, _ in known.wanted)


def _progress(known: Situation) -> dict[str, Any]:
    report = known.report
    old = dict(known.job.status.get("progress") or {})
    step = max(report.step if report else known.memory.step, old.get("step", 0), _completed_step(known))
    total = (report.total_steps if report else old.get("totalSteps")) or _steps_of(known)
    new = {"step": step, "totalSteps": total, "shown": f"{step}/{total}"}
    if report is None:
        return old | new
    gauges = {
        "reward": report.reward, "kl": report.kl, "tokensPerSecond": report.tokens_per_second,
        "acceptedPerVerification": report.accepted_per_verification, "etaSeconds": report.eta_seconds,
    }  # fmt: skip
    new["checkpointStep"] = max(report.checkpoint_step, old.get("checkpointStep", 0))
    return new | {name: round(value, 4) for name, value in gauges.items() if value is not None}


def _steps_of(known: Situation) -> int:
    return known.spec.training.steps if known.job.job else 0


def _completed_step(known: Situation) -> int:
    """Return the step in the trainer's final message, which control may not have reported, or 0 without one."""
    outcome = known.memory.outcome
    said = re.match(r"completed: step (\d+)", outcome.message) if outcome and outcome.type == "Succeeded" else None
    return int(said[1]) if said else 0


def _conditions(known: Situation, phase: str, found: Said | None) -> list[dict[str, Any]]:
    memory, outcome = known.memory, known.memory.outcome
    is_open = memory.state == "open" and outcome is None
    ended = Said(outcome.reason, outcome.message) if outcome else Said(phase)
    is_ready = is_open and memory.prepared and all_ready(known)
    now = {
        "Ready": (is_ready, Said("AllReady" if is_ready else phase)),
        "Prepared": (memory.prepared, Said("Prepared" if memory.prepared else phase)),
        "Running": (is_open and memory.running_since is not None, Said(phase)),
        "Succeeded": (outcome is not None and outcome.type == "Succeeded", ended),
        "Failed": (outcome is not None and outcome.type == "Failed", ended),
        "Suspended": (phase == "Suspended", Said(phase)),
        "Healthy": (found is None, found or Said("AsExpected")),
    }
    if known.job.job is not None and known.spec.roles.gateway.workers:
        now["Serving"] = _serving(known, phase)
    before = {condition["type"]: condition for condition in known.job.status.get("conditions") or ()}
    return [
        _condition(known.job, known.now, type_, is_true, said, before.get(type_))
        for type_, (is_true, said) in now.items()
    ]


def serving_of(known: Situation) -> dict[str, str]:
    """Return where clients find the job's gateway and its token, or {} while it has no pod."""
    job, pod = known.job, known.by_key.get((GATEWAY.name, 0))
    if pod is None or job.job is None:
        return {}
    secret = known.spec.roles.gateway.token_secret or names.secret_name(job.name, names.CLIENTS, job.uid)
    return {"url": pod.url, "tokenSecret": secret}


def _serving(known: Situation, phase: str) -> tuple[bool, Said]:
    pod = known.by_key.get((GATEWAY.name, 0))
    if pod is not None and pod.ready and not pod.is_deleting:
        where = serving_of(known)
        return True, Said("Serving", f"{where['url']}, with the token in Secret {where['tokenSecret']}")
    if phase not in ("Starting", "Running"):
        return False, Said(phase)
    if not any(each.ready for each in known.pods if each.role == "generator"):
        return False, Said("NoGeneratorReady", "no generator is ready")
    return False, Said("GatewayNotReady", "the gateway is not ready")


def _condition(
    job: JobView, now: datetime, type_: str, is_true: bool, said: Said, before: Mapping[str, Any] | None
) -> dict[str, Any]:
    status = "True" if is_true else "False"
    since = before.get("lastTransitionTime") if before is not None and before["status"] == status else None
    return {
        "type": type_,
        "status": status,
        "reason": said.reason,
        "message": said.message,
        "lastTransitionTime": since or text_of(now.replace(microsecond=0)),
        "observedGeneration": job.generation,
    }


def _events(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Event]:
    was, now = _said_of(old, "Healthy"), _said_of(new, "Healthy")
    if old.get("phase") != new["phase"]:
        is_bad = new["phase"] == "Failed"
        message = new["message"] if new["phase"] in ("Failed", "Succeeded") else f"The job is {new['phase']}"
        yield Event("Warning" if is_bad else "Normal", new["phase"], message or new["phase"])
    if now["status"] == "False" and now["reason"] != was.get("reason") and new["phase"] != "Failed":
        yield Event("Warning", now["reason"], now["message"])
    was, now = _said_of(old, "Serving"), _said_of(new, "Serving")
    if now and now["status"] != was.get("status", "False"):
        yield Event("Normal", "Serving" if now["status"] == "True" else "NotServing", now["message"] or now["reason"])
    if old.get(INTERNAL) == new.get(INTERNAL):
        return
    before, after = Memory.of(old), Memory.of(new)
    for name, memory in after.workers.items():
        if memory.pod != before.of_worker(name).pod:
            yield Event("Warning", "WorkerEnded", f"{name}: {memory.reason}: {memory.message}"[:1000])
    if before.generators != after.generators and before.number == after.number:
        yield Event("Normal", "Scaled", f"{before.generators} -> {after.generators} generators")


def _said_of(status: Mapping[str, Any], type_: str) -> Mapping[str, Any]:
    for condition in status.get("conditions") or ():
        if condition["type"] == type_:
            return condition  # type: ignore[no-any-return]
    return {}


def phase_of(known: Situation) -> str:
    memory = known.memory
    suspend = known.job.job is not None and known.spec.suspend
    prepare = known.by_key.get((names.PREPARE, 0))
    is_preparing = memory.state == "open" and not memory.prepared
    rules = (
        ("Terminating", known.job.deleting_since is not None),
        (memory.outcome.type if memory.outcome else "", memory.outcome is not None),
        ("Suspending", memory.state == "closing" and (suspend or kueue.withdraws(known))),
        ("Suspended", memory.state == "closed" and suspend),
        ("Pending", memory.state == "closed"),
        ("Pending", is_preparing and (prepare is None or prepare.node is None)),
        ("Preparing", is_preparing),
        ("Running", memory.state == "open" and memory.running_since is not None),
    )
    return next((phase for phase, holds in rules if holds), "Starting")

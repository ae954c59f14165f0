"""Conversion of API objects into the operator's views.

Example:
    >>> view = job_view({"metadata": {"name": "sums", "namespace": "rl", "uid": "6f1c", "generation": 1,
    ...     "resourceVersion": "7", "creationTimestamp": "2026-01-01T00:00:00Z"}, "spec": {"trainig": {}}})
    >>> view.job, view.problems[-1].field
    (None, 'spec.trainig')
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from rlhfspec.cluster import names
from rlhfspec.errors import Problem
from rlhfspec.job import API_VERSION, RLHFJob
from rlhfspec.job.file.checks import check
from rlhfspec.job.file.problems import explain
from rlhfspec.operator.deciding.memory import maybe_time_of, tidy
from rlhfspec.operator.deciding.observed import JobView, PodView, Said, Terminated, Worker, worker_of
from rlhfspec.operator.making.workloads import owner_of

FINISHED = ("Succeeded", "Failed")
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def job_view(body: Mapping[str, Any], before: JobView | None = None) -> JobView:
    """Return the view of an RLHFJob; `before` is reused to skip the validation of an unchanged manifest."""
    metadata = body["metadata"]
    manifest: Mapping[str, Any] = manifest_of(body)
    if before is not None and before.manifest == manifest:
        manifest, job, problems = before.manifest, before.job, before.problems
    else:
        job, problems = read(manifest)
    return JobView(
        namespace=metadata["namespace"], name=metadata["name"], uid=metadata["uid"],
        generation=metadata.get("generation", 1), resource_version=metadata.get("resourceVersion", ""),
        created=datetime.fromisoformat(metadata["creationTimestamp"]),
        deleting_since=maybe_time_of(metadata.get("deletionTimestamp")),
        leaves_orphans="orphan" in (metadata.get("finalizers") or ()),
        manifest=manifest, status=tidy(body.get("status") or {}), job=job, problems=problems,
    )  # fmt: skip


def manifest_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest without status and fields that the API server adds."""
    metadata = body["metadata"]
    annotations = {k: v for k, v in (metadata.get("annotations") or {}).items() if k != _LAST_APPLIED}
    kept = {"name": metadata["name"], "namespace": metadata["namespace"]}
    kept |= {"labels": labels} if (labels := metadata.get("labels")) else {}
    kept |= {"annotations": annotations} if annotations else {}
    return {"apiVersion": API_VERSION, "kind": names.KIND, "metadata": kept, "spec": body.get("spec") or {}}


def read(manifest: Mapping[str, Any]) -> tuple[RLHFJob | None, tuple[Problem, ...]]:
    """Return (job or None, problems) of a manifest, without checks of local files."""
    try:
        job = RLHFJob.model_validate(manifest)
        problems = tuple(finding.as_problem({}) for finding in check(job))
    except ValidationError as error:
        return None, tuple(explain(error, manifest, {})[0])
    except Exception as error:  # a manifest must not end the watch
        return None, (Problem(field="spec", problem=f"{type(error).__name__}: {error}"[:900]),)
    return (None if problems else job), problems


def pod_view(pod: Mapping[str, Any]) -> PodView | None:
    """Return the view of a job's pod, identified by owner and name because labels can be forged."""
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    owner = owner_of(metadata)
    if owner is None or (worker := _worker_of(metadata["name"], owner["name"])) is None:
        return None
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    ready = conditions.get("Ready", {})
    container, state = _container(status), _state(spec, status)
    phase = _phase_of_worker(status, container)
    return PodView(
        name=metadata["name"], uid=metadata["uid"], role=worker[0], worker=worker[1],
        run=labels.get(names.RUN, ""), owner=owner["uid"],
        restart_id=annotations.get(names.RESTART_ID, ""), proof=annotations.get(names.PROOF, ""),
        url=annotations.get(names.URL, ""),
        phase=phase, lingers=phase in FINISHED and _has_sidecar_left(status),
        ready=bool(container.get("ready", ready.get("status") == "True")) and phase not in FINISHED,
        ready_changed=maybe_time_of(ready.get("lastTransitionTime")), node=spec.get("nodeName"),
        created=datetime.fromisoformat(metadata["creationTimestamp"]),
        gone_by=maybe_time_of(metadata.get("deletionTimestamp")),
        grace_seconds=metadata.get("deletionGracePeriodSeconds") or 0.0,
        why=_said(status) if status.get("reason") else None,
        unscheduled=_unless(conditions.get("PodScheduled"), "True"), waiting=_maybe_said(state.get("waiting")),
        terminated=_terminated(state.get("terminated")),
        has_sandbox=conditions.get("PodReadyToStartContainers", {}).get("status") == "True",
        disruption=_unless(conditions.get("DisruptionTarget"), "False"),
    )  # fmt: skip


def _worker_of(pod: str, job: str) -> Worker | None:
    """Return the role and number of a job's pod, or None.

    >>> _worker_of("sums-generator-2", "sums"), _worker_of("sums-shell", "sums"), _worker_of("other-reward-0", "sums")
    (('generator', 2), None, None)
    """
    worker = worker_of(pod.removeprefix(f"{job}-"))
    return worker if worker[0] in names.ROLES and pod == names.pod_name(job, *worker) else None


def _container(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the status of the worker's container."""
    return next((each for each in status.get("containerStatuses") or () if each["name"] == names.CONTAINER), {})


def _has_sidecar_left(status: Mapping[str, Any]) -> bool:
    """Return whether an ordinary sidecar still runs; native sidecars are stopped by the kubelet."""
    others = (each for each in status.get("containerStatuses") or () if each["name"] != names.CONTAINER)
    return any("terminated" not in (each.get("state") or {}) for each in others)


def _phase_of_worker(status: Mapping[str, Any], container: Mapping[str, Any]) -> Any:
    """Return the phase of the ended worker container, or the pod's if the pod has its own reason or the worker runs."""
    ended = (container.get("state") or {}).get("terminated")
    if ended and not status.get("reason"):
        return "Failed" if ended.get("exitCode") else "Succeeded"
    return status.get("phase", "Pending")


def _state(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of the worker's container, or of an init container that blocks it."""
    state: Mapping[str, Any] = _container(status).get("state") or {}
    if "running" in state or "terminated" in state:
        return state
    sidecars = {init["name"] for init in spec.get("initContainers") or () if init.get("restartPolicy") == "Always"}
    for init in status.get("initContainerStatuses") or ():
        other = init.get("state") or {}
        waits = (other.get("waiting") or {}).get("reason", "PodInitializing") != "PodInitializing"
        if waits or (init["name"] not in sidecars and (other.get("terminated") or {}).get("exitCode")):
            return dict(other)
    return state


def _said(said: Mapping[str, Any]) -> Said:
    return Said(said.get("reason") or "", said.get("message") or "")


def _maybe_said(said: Mapping[str, Any] | None) -> Said | None:
    return _said(said) if said else None


def _unless(condition: Mapping[str, Any] | None, status: str) -> Said | None:
    return _said(condition) if condition is not None and condition.get("status") != status else None


def _terminated(state: Mapping[str, Any] | None) -> Terminated | None:
    if not state:
        return None
    return Terminated(
        exit_code=state.get("exitCode", 0), reason=state.get("reason") or "",
        message=last_line(state.get("message") or ""), at=maybe_time_of(state.get("finishedAt")),
    )  # fmt: skip


def last_line(text: str) -> str:
    r"""Return the last non-empty line of a termination message.

    >>> last_line("Traceback ...\nMemoryError: big\n")
    'MemoryError: big'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""

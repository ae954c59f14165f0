"""Dry run of a job's pods before a run, because only the API server can validate their fields."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from rlhfspec.cluster import names
from rlhfspec.cluster.api import ApiResponse
from rlhfspec.job import RLHFJob
from rlhfspec.job.cluster import PodOptions
from rlhfspec.operator.deciding.allowed import references
from rlhfspec.operator.deciding.observed import DryRunResult
from rlhfspec.operator.deciding.situation import NOTHING, Actions, NamedObject, Situation, pods_of
from rlhfspec.operator.making import objects

_ONLY_A_TRIAL = ("dry run", "dryRun")  # webhooks without dry-run support
# Refusals by webhooks or policies, which are no error in the spec.
_NOT_ABOUT_WORDS = ("webhook", "is forbidden: ", *_ONLY_A_TRIAL)
_MAX_PROBLEM_CHARACTERS = 2000
_LABEL_RETRY_SECONDS = 15.0  # retry interval of an object without the label
_TYPES_ARE_WRONG = "failed to create typed patch object"
_CANNOT_READ = 'Pod in version "v1" cannot be handled as a Pod: '
_WRONG_TYPE = re.compile(r"cannot unmarshal (\w+) into Go struct field \w+\.(\S+) of type (\S+)")
_GIVEN = {"array": "a list", "object": "a mapping", "bool": "true or false"}
_GO_TYPES = {"string": "a string", "bool": "true or false"} | dict.fromkeys(("int", "int32", "int64"), "a whole number")


def actions(known: Situation) -> Actions:
    """Return the dry run that is due before the next run; each generation of the job has one."""
    memory, last = known.memory, known.observed.trial
    if memory.state != "closed" or not _is_needed(known) or not (memory.outcome is None or known.never_ran):
        return NOTHING
    if last is not None and last.generation == known.job.generation:
        if last.again_at is None:
            return NOTHING
        if last.again_at > known.now:
            return known.requeued_at(last.again_at)
    pods = tuple(objects.pod(known, (role, 0)) for role in _roles(known))
    return Actions(trial=pods, references=references(known))


def is_passed(known: Situation) -> bool:
    last = known.observed.trial
    return not _is_needed(known) or (last is not None and last.generation == known.job.generation and not last.problem)


def _is_needed(known: Situation) -> bool:
    return known.job.job is not None and bool(_roles(known) or references(known))


def _roles(known: Situation) -> list[str]:
    """Return the roles with user-written pod fields; a template for all roles is tried with `prepare`."""
    if known.job.job is None:
        return []
    roles = (names.PREPARE, names.CONTROL, *pods_of(known.job.job))
    options: dict[str, PodOptions] = {role: getattr(known.spec.roles, role) for role in roles}
    for_all = [names.PREPARE] if known.spec.pod_template else []
    return [role for role in roles if options[role].pod_template or options[role].resources or role in for_all]


def unlabelled(
    references: Sequence[NamedObject], answers: Sequence[ApiResponse], label: str, now: datetime, generation: int
) -> DryRunResult | None:
    """Return the failed result if a referenced object lacks the label, else None."""
    for asked, answer in zip(references, answers, strict=True):
        if answer.is_refused:
            is_told = answer.is_missing or answer.code == 422
            why = f"does not exist, or has no label {label}=true" if is_told else f"cannot be read: {answer.message}"
            problem = f"{asked.field}: {asked.kind} {asked.name} {why}"
            return DryRunResult(generation, problem, now + timedelta(seconds=_LABEL_RETRY_SECONDS))
    return None


def problem_of(job: RLHFJob | None, tried: Sequence[dict[str, Any]], answers: Sequence[ApiResponse]) -> str:
    """Return the API server's first problem with the user's fields, or an empty text."""
    for pod, answer in zip(tried, answers, strict=True):
        if _is_about_words(answer):
            where = _where(job, pod["metadata"]["labels"][names.ROLE])
            return f"{where}: the API server refuses the pod: {_in_words(answer.message)}"[:_MAX_PROBLEM_CHARACTERS]
    return ""


def refusals(tried: Sequence[dict[str, Any]], answers: Sequence[ApiResponse]) -> list[tuple[str, ApiResponse]]:
    """Return (pod name, response) of `prepare` rejections that would also occur without a dry run."""
    return [
        (pod["metadata"]["name"], answer)
        for pod, answer in zip(tried, answers, strict=True)
        if pod["metadata"]["labels"][names.ROLE] == names.PREPARE
        and answer.is_refused
        and not answer.is_taken
        and not any(word in answer.message for word in _ONLY_A_TRIAL)
    ]


def _where(job: RLHFJob | None, role: str) -> str:
    """Return the fields of the job that contribute to the role's pods."""
    if job is None:
        return f"spec.roles.{role}"
    options: PodOptions = getattr(job.spec.roles, role)
    written = [f"spec.roles.{role}"] if options.pod_template or options.resources else []
    return " or ".join([*written, *(["spec.podTemplate"] if job.spec.pod_template else [])])


def _in_words(message: str) -> str:
    """Return an API server's parse error without Go terms.

    >>> told = 'Pod in version "v1" cannot be handled as a Pod: '
    >>> field = "PodSpec.spec.tolerations of type []v1.Toleration"
    >>> _in_words(told + f"json: cannot unmarshal string into Go struct field {field}")
    'spec.tolerations must be a list of Toleration, not a string'
    >>> _in_words(told + 'strict decoding error: unknown field "spec.nodeselector"')
    'unknown field "spec.nodeselector"'
    >>> _in_words("Required value")
    'Required value'
    """
    found = _WRONG_TYPE.search(message)
    if found is None:
        return message.removeprefix(_CANNOT_READ).removeprefix("strict decoding error: ")
    is_given, place, wanted = found.groups()
    return f"{place} must be {_type_in_words(wanted)}, not {_GIVEN.get(is_given, 'a ' + is_given)}"


def _type_in_words(kind: str) -> str:
    if kind.startswith("[]"):
        return f"a list of {kind.removeprefix('[]').rpartition('.')[2]}"
    if kind.startswith("map["):
        return "a mapping"
    return _GO_TYPES.get(kind, f"a mapping ({kind.rpartition('.')[2]})")


def _is_about_words(answer: ApiResponse) -> bool:
    """Return whether a refusal is caused by the user's fields.

    >>> _is_about_words(ApiResponse(422, {"message": 'Pod "a" is invalid: spec.containers[0].name: Required value'}))
    True
    >>> _is_about_words(ApiResponse(403, {"message": "exceeded quota: a"}))
    False
    >>> denied = 'pods "a" is forbidden: ValidatingAdmissionPolicy "b" with binding "b" denied request: not today'
    >>> _is_about_words(ApiResponse(422, {"message": denied}))
    False
    """
    is_wrong = answer.code in (400, 422) or (answer.code == 500 and _TYPES_ARE_WRONG in answer.message)
    return is_wrong and not any(word in answer.message for word in _NOT_ABOUT_WORDS)

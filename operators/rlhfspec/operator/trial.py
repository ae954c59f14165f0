"""Whether pods can be made of what the user wrote: the API server is asked before a run opens, and makes nothing.

The schema of a job cannot say what a `podTemplate` or an amount of a resource may be; only who makes pods knows. What
it refuses for another reason, such as a quota, is left for the pods themselves: it may be otherwise by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhfspec.cluster import names
from rlhfspec.cluster.api import Answer
from rlhfspec.job_cluster import PodOptions
from rlhfspec.loop import workers_of
from rlhfspec.operator import objects
from rlhfspec.operator.draft import Draft

# Of a webhook that takes no part in a trial, or denies it: what it says is no fault of the job's words.
_NOT_ABOUT_WORDS = ("webhook", "dry run", "dryRun")
MOST_CHARACTERS = 2000
_TYPES_ARE_WRONG = "failed to create typed patch object"


def is_due(draft: Draft) -> bool:
    memory, last = draft.memory, draft.observed.trial
    may_begin = memory.state == "closed" and (memory.outcome is None or draft.never_ran)
    return may_begin and (last is None or last.generation != draft.job.generation) and bool(_roles(draft))


def is_passed(draft: Draft) -> bool:
    last = draft.observed.trial
    return not _roles(draft) or (last is not None and last.generation == draft.job.generation and not last.problem)


def pods(draft: Draft) -> list[dict[str, Any]]:
    return [objects.pod(draft, (role, 0)) for role in _roles(draft)]


def _roles(draft: Draft) -> list[str]:
    """Of whose pods the user wrote more than which image; what is written for all of them is tried by one."""
    if draft.job.job is None:
        return []
    roles = (names.PREPARE, names.CONTROL, *workers_of(draft.job.job))
    options: dict[str, PodOptions] = {role: getattr(draft.spec.roles, role) for role in roles}
    for_all = [names.PREPARE] if draft.spec.pod_template else []
    return [role for role in roles if options[role].pod_template or options[role].resources or role in for_all]


def problem_of(tried: Sequence[dict[str, Any]], answers: Sequence[Answer]) -> str:
    """The first; empty: none is the user's."""
    for pod, answer in zip(tried, answers, strict=True):
        if _is_about_words(answer):
            where = f"spec.roles.{pod['metadata']['labels'][names.ROLE]} (or spec.podTemplate)"
            return f"{where}: no pod can be made of it: {answer.message}"[:MOST_CHARACTERS]
    return ""


def _is_about_words(answer: Answer) -> bool:
    """
    >>> _is_about_words(Answer(422, {"message": 'Pod "a" is invalid: spec.containers[0].env[0].name: Required value'}))
    True
    >>> _is_about_words(Answer(403, {"message": "exceeded quota: a"}))
    False
    """
    is_wrong = answer.code in (400, 422) or (answer.code == 500 and _TYPES_ARE_WRONG in answer.message)
    return is_wrong and not any(word in answer.message for word in _NOT_ABOUT_WORDS)

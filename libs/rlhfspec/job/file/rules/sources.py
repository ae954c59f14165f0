"""Rules on contradictions among reward sources, in Python and CEL.

CEL rules of the whole job cannot point at a list item, so their messages name the item's field.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rlhfspec.job import RLHFJob
from rlhfspec.job.file.problems import Finding
from rlhfspec.job.file.rules.condition import to_cel
from rlhfspec.job.file.schema import in_cel
from rlhfspec.job.file.secrets import shown_url
from rlhfspec.job.rewards import FunctionSource, RewardSource

MODULE_MEMBER = re.compile(r"^(reasoning-gym|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*)$")
NOT_A_MEMBER = "must be module:function, such as rewards:exact for the function exact in rewards.py"
PATH = "spec.rewards.sources"
_CEL_SOURCES = f"self.{PATH}"
_ALWAYS_0 = "the reward would always be 0: give a weight other than 0"
_SAME_SOURCE = " || ".join(
    f"(has(a.{own}) && has(b.{own}) && a.{own} == b.{own})" for own in (in_cel("function"), "path", "url")
)
_SAME_NAME = f"has(a.name) ? has(b.name) && a.name == b.name : !has(b.name) && ({_SAME_SOURCE})"
_NOT_A_PRODUCT = to_cel("rewards.combine != 'product'")


@dataclass(frozen=True, kw_only=True)
class SourcesRule:
    findings: Callable[[RLHFJob], Iterator[Finding]]
    cel: str
    message: str


def _each(job: RLHFJob) -> Iterator[tuple[str, RewardSource]]:
    for index, source in enumerate(job.spec.rewards.sources):
        yield f"{PATH}[{index}]", source


def functions(job: RLHFJob) -> Iterator[Finding]:
    """Check the function name of each source, which API servers check item by item."""
    for path, source in _each(job):
        if isinstance(source, FunctionSource) and not MODULE_MEMBER.match(source.function):
            yield Finding(field=f"{path}.function", value=source.function, problem=NOT_A_MEMBER)


def _batches(job: RLHFJob) -> Iterator[Finding]:
    for path, source in _each(job):
        if isinstance(source, FunctionSource) and source.batched and job.spec.roles.reward.workers > 1:
            yield Finding(
                field=f"{path}.batched", value=True, depends_on=("spec.roles.reward.workers",),
                problem="one worker must score a whole group: must be false, or roles.reward.workers must be 1",
            )  # fmt: skip


def _deadlines(job: RLHFJob) -> Iterator[Finding]:
    deadline = job.spec.roles.reward.deadline_seconds
    for path, source in _each(job):
        longest = source.timeout_seconds * (source.retries + 1)
        if longest >= deadline:
            yield Finding(
                field=f"{path}.timeoutSeconds", value=source.timeout_seconds,
                problem=f"with {source.retries} retries a sample may take {longest:g} s, over "
                f"roles.reward.deadlineSeconds ({deadline:g}): lower it, or raise the deadline",
                depends_on=(f"{path}.retries", "spec.roles.reward.deadlineSeconds"),
            )  # fmt: skip


def _names(job: RLHFJob) -> Iterator[Finding]:
    names = [_shown_name(source) for source in job.spec.rewards.sources]
    counts = Counter(names)
    for index, name in enumerate(names):
        if counts[name] > 1 and name not in names[:index]:
            problem = f"{counts[name]} sources share it; give each its own name"
            yield Finding(field=f"{PATH}[{index}].name", value=shown_url(name), problem=problem)


def _shown_name(source: RewardSource) -> str:
    if source.name is not None:
        return source.name
    return getattr(source, {"function": "function", "model": "path", "http": "url"}[source.type])  # type: ignore[no-any-return]


def _weights(job: RLHFJob) -> Iterator[Finding]:
    sources = job.spec.rewards.sources
    zero = [index for index, source in enumerate(sources) if source.weight == 0]
    if len(zero) == len(sources) or (zero and job.spec.rewards.combine == "product"):
        path = f"{PATH}[{zero[0]}].weight"
        yield Finding(field=path, value=0.0, problem=_ALWAYS_0, depends_on=("spec.rewards.combine",))


SOURCES_RULES: tuple[SourcesRule, ...] = (
    SourcesRule(
        findings=_batches,
        cel=f"{to_cel('roles.reward.workers == 1')} || !{_CEL_SOURCES}.exists(s, s.?batched.orValue(false))",
        message="batched: one worker must score a whole group: must be false, or roles.reward.workers must be 1",
    ),
    SourcesRule(
        findings=_deadlines,
        cel=f"{_CEL_SOURCES}.all(s, double(s.?retries.orValue(2) + 1) * s.?timeoutSeconds.orValue(60.0) < "
        f"{to_cel('roles.reward.deadlineSeconds')})",
        message="timeoutSeconds: with its retries a sample may take longer than roles.reward.deadlineSeconds: "
        "lower it, or raise the deadline",
    ),
    SourcesRule(
        findings=_names,
        cel=f"{_CEL_SOURCES}.all(a, {_CEL_SOURCES}.exists_one(b, {_SAME_NAME}))",
        message="name: several sources share it; give each its own name",
    ),
    SourcesRule(
        findings=_weights,
        cel=f"{_CEL_SOURCES}.exists(s, s.?weight.orValue(1.0) != 0.0) && "
        f"({_NOT_A_PRODUCT} || "
        f"{_CEL_SOURCES}.all(s, s.?weight.orValue(1.0) != 0.0))",
        message=f"weight: {_ALWAYS_0}",
    ),
)

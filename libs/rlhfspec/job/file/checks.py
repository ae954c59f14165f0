"""Checks for contradictions in a job that `rules` cannot express for an API server.

Defaults never count as contradictions, so that a resolved job can be read back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlhfspec.job import RLHFJob
from rlhfspec.job.choices.engines import ENGINES
from rlhfspec.job.cluster import PodOptions, PodTemplate
from rlhfspec.job.file.problems import Finding
from rlhfspec.job.file.rules.sources import SOURCES_RULES, functions
from rlhfspec.job.file.rules.table import RULES
from rlhfspec.job.file.schema import QUANTITY

_QUANTITY = re.compile(QUANTITY)
OWN_LABELS = "rlhfspec.io/"


def check(job: RLHFJob) -> Iterator[Finding]:
    yield from _check_dataset(job)
    yield from (rule.finding(job.spec) for rule in RULES if not rule.is_kept(job.spec))
    yield from functions(job)
    for rule in SOURCES_RULES:
        yield from rule.findings(job)
    yield from _check_critic(job)
    yield from _check_lora(job)
    yield from _check_engine(job)
    yield from _check_pods(job)
    yield from _check_failure_rules(job)


def _check_dataset(job: RLHFJob) -> Iterator[Finding]:
    data = job.spec.dataset
    if data.prompt_column is None and data.messages_column is None:
        yield Finding(field="spec.dataset.promptColumn", problem="set the column of the prompts, or messagesColumn")


def _check_critic(job: RLHFJob) -> Iterator[Finding]:
    """Yield a finding for critic optimizer arguments without a critic, which are untyped in the CRD."""
    algorithm = job.spec.algorithm
    if not algorithm.entry.has_critic and job.spec.training.critic_optimizer.arguments:
        problem = f"{algorithm.name} has no critic: remove it"
        yield Finding(field="spec.training.criticOptimizer", problem=problem, depends_on=("spec.algorithm.name",))


def _check_lora(job: RLHFJob) -> Iterator[Finding]:
    lora = job.spec.model.lora
    if lora is not None and lora.target_modules == []:
        yield Finding(field="spec.model.lora.targetModules", problem="must name a layer, or be all-linear")


def _check_engine(job: RLHFJob) -> Iterator[Finding]:
    engine = job.spec.generation.engine
    for name, problem in ENGINES[engine.name].problems(engine.arguments):
        yield Finding(field=f"spec.generation.engine.arguments.{name}", problem=problem)


def _check_pods(job: RLHFJob) -> Iterator[Finding]:
    roles = job.spec.roles
    yield from _check_pod_template(job.spec.pod_template, "spec.podTemplate")
    for name in type(roles).model_fields:
        yield from _check_pod_options(getattr(roles, name), f"spec.roles.{name}")


def _check_pod_options(options: PodOptions, path: str) -> Iterator[Finding]:
    for which, amounts in options.resources.items():
        for name, amount in amounts.items():
            if not _QUANTITY.match(str(amount)):
                field, problem = f"{path}.resources.{which}", f"{name} must be an amount such as 1, 500m or 16Gi"
                yield Finding(field=field, value=amount, problem=problem)
    yield from _check_pod_template(options.pod_template, f"{path}.podTemplate")


def _check_pod_template(template: PodTemplate, path: str) -> Iterator[Finding]:
    metadata, pod = template.get("metadata", {}), template.get("spec", {})
    for name in set(metadata) - {"labels", "annotations"}:
        yield Finding(field=f"{path}.metadata.{name}", problem="must be labels or annotations; remove it")
    for kind in ("labels", "annotations"):
        texts = metadata.get(kind, {})
        if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
            yield Finding(field=f"{path}.metadata.{kind}", problem="must be a block of names and text values")
        elif any(name.startswith(OWN_LABELS) for name in texts):
            problem = f"{OWN_LABELS}... is reserved for the operator; use another name"
            yield Finding(field=f"{path}.metadata.{kind}", problem=problem)
    if pod.get("restartPolicy", "Never") != "Never":
        problem = "failurePolicy decides on restarts; remove it"
        yield Finding(field=f"{path}.spec.restartPolicy", problem=problem)
    for kind in ("containers", "initContainers", "volumes"):
        items = pod.get(kind, [])
        if not isinstance(items, list) or not all(isinstance(item, dict) and item.get("name") for item in items):
            problem = "must be a list of blocks with a name each, by which they are merged"
            yield Finding(field=f"{path}.spec.{kind}", problem=problem)


def _check_failure_rules(job: RLHFJob) -> Iterator[Finding]:
    decided: dict[tuple[str, int], int] = {}
    for index, rule in enumerate(job.spec.failure_policy.rules):
        pairs = [(role, code) for role in rule.roles or ("",) for code in rule.exit_codes]
        first = [decided.get(pair, decided.get(("", pair[1]), index)) for pair in pairs]
        if all(earlier < index for earlier in first):
            field, problem = f"spec.failurePolicy.rules[{index}]", f"never applies: rules[{first[0]}] matches first"
            yield Finding(field=field, problem=problem)
        for pair in pairs:
            decided.setdefault(pair, index)

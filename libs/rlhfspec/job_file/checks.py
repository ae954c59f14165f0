"""Checks across fields: what contradicts each other. Each finding names a field and the fix.

Defaults never count as a contradiction, so a job written out in full by a run reads back.

Example:
    >>> from rlhfspec.job import RLHFJob
    >>> job = RLHFJob.model_validate({
    ...     "apiVersion": "rlhfspec.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "sums"},
    ...     "spec": {"model": {"path": "m"}, "dataset": {"path": "d.jsonl"}, "algorithm": {"samplesPerPrompt": 1},
    ...              "rewards": {"sources": [{"type": "function", "function": "rewards:exact"}]}},
    ... })
    >>> [finding.problem for finding in check(job)]
    ['grpo compares the responses to one prompt: must be >= 2']
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic.alias_generators import to_snake

from rlhfspec.choices.algorithms import ALGORITHMS
from rlhfspec.choices.of_a_job import CHOICES
from rlhfspec.errors import Problem
from rlhfspec.job import RLHFJob, Workers
from rlhfspec.job_cluster import PodOptions, PodTemplate, Storage
from rlhfspec.job_file.problems import place_of
from rlhfspec.job_file.schema import QUANTITY
from rlhfspec.job_file.secrets import shown_url, shown_value
from rlhfspec.job_file.yaml_text import Path_, parts_of
from rlhfspec.job_rewards import FunctionSource, RewardSource

MODULE_MEMBER = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")
CLASS = re.compile(r"^([A-Za-z_]\w*(\.[A-Za-z_]\w*)*:)?[A-Za-z_]\w*$")
_QUANTITY = re.compile(QUANTITY)
OWN_LABELS = "rlhfspec.io/"
WITH_CRITIC = ALGORITHMS.where(lambda entry: entry.has_critic)
REMOVE_OR_TAKE_A_CRITIC = f"remove it, or take algorithm.name: {' or '.join(WITH_CRITIC)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`depends_on`: the other fields it was concluded from; when one of those is wrong itself, this says nothing."""

    field: str
    problem: str
    value: object = None
    depends_on: tuple[str, ...] = ()

    def as_problem(self, places: Mapping[Path_, str]) -> Problem:
        path = parts_of(self.field)
        value = shown_value(path, self.value)
        return Problem(field=self.field, value=value, problem=self.problem, where=place_of(path, places))

    def rests_on(self, wrong: set[str]) -> bool:
        """Whether one of the fields it looks at is wrong."""
        return any(name in wrong for name in (self.field, *self.depends_on))


def check(job: RLHFJob) -> Iterator[Finding]:
    yield from _check_dataset(job)
    yield from _check_algorithm(job)
    yield from _check_critic_settings(job)
    yield from _check_needs(job)
    yield from _check_generation(job)
    yield from _check_rewards(job)
    yield from _check_training(job)
    yield from _check_exact_on_policy(job)
    yield from _check_generators(job)
    yield from _check_pods(job)
    yield from _check_cluster(job)


def _check_dataset(job: RLHFJob) -> Iterator[Finding]:
    data = job.spec.dataset
    if data.prompt_column is None and data.messages_column is None:
        yield Finding(field="spec.dataset.promptColumn", problem="name the prompts' column, or messagesColumn")
    if data.prompt_column is not None and data.messages_column is not None:
        yield Finding(
            field="spec.dataset.messagesColumn", value=data.messages_column,
            problem="prompts are text or messages, not both: remove it, or promptColumn",
            depends_on=("spec.dataset.promptColumn",),
        )  # fmt: skip


def _check_algorithm(job: RLHFJob) -> Iterator[Finding]:
    algorithm, path = job.spec.algorithm, "spec.algorithm"
    group = algorithm.entry.compares_responses
    name = (f"{path}.name",)
    if group and algorithm.samples_per_prompt < 2:
        yield Finding(
            field=f"{path}.samplesPerPrompt", value=algorithm.samples_per_prompt, depends_on=name,
            problem=f"{algorithm.name} compares the responses to one prompt: must be >= 2",
        )  # fmt: skip
    if algorithm.dynamic_sampling and not group:
        yield Finding(
            field=f"{path}.dynamicSampling", value=True, depends_on=name,
            problem=f"replaces groups of equal rewards, and {algorithm.name} has no groups: must be false",
        )  # fmt: skip
    for field, clip in (("clipLow", algorithm.clip_low), ("clipHigh", algorithm.clip_high)):
        if clip == 0:
            yield Finding(field=f"{path}.{field}", value=clip, problem="0 clips every ratio: must be > 0, such as 0.2")
    if algorithm.overlong_buffer >= job.spec.generation.max_tokens:
        yield Finding(
            field=f"{path}.overlongBuffer", value=algorithm.overlong_buffer,
            problem=f"must be < generation.maxTokens ({job.spec.generation.max_tokens})",
            depends_on=("spec.generation.maxTokens",),
        )  # fmt: skip


def _check_critic_settings(job: RLHFJob) -> Iterator[Finding]:
    """What is set for a critic would be silently ignored by an algorithm without one."""
    algorithm, name = job.spec.algorithm, ("spec.algorithm.name",)
    if algorithm.entry.has_critic:
        if algorithm.value_clip == 0:
            yield Finding(field="spec.algorithm.valueClip", value=0.0, problem="0 clips every value: must be > 0")
        return
    settings = {
        "spec.algorithm.gaeLambda": (algorithm.gae_lambda, 0.95),
        "spec.algorithm.valueClip": (algorithm.value_clip, 0.2),
        "spec.algorithm.valueCoefficient": (algorithm.value_coefficient, 0.5),
        "spec.model.critic": (job.spec.model.critic, None),
        "spec.training.criticOptimizer": (
            job.spec.training.critic_optimizer,
            type(job.spec.training).model_fields["critic_optimizer"].default,
        ),
    }
    for field, (value, default) in settings.items():
        if value != default:
            problem = f"{algorithm.name} has no critic: {REMOVE_OR_TAKE_A_CRITIC}"
            shown = value if isinstance(value, (str, float)) else None
            yield Finding(field=field, value=shown, problem=problem, depends_on=name)


def _check_needs(job: RLHFJob) -> Iterator[Finding]:
    """What is chosen by name may need another field."""
    for registry in CHOICES:
        name = _value(job, registry.field)
        entry = registry.get(name)
        for need in entry.needs if entry is not None else ():
            if _value(job, need) is None:
                yield Finding(
                    field=f"spec.{registry.field}", value=name, depends_on=(f"spec.{need}",),
                    problem=registry.missing(need),
                )  # fmt: skip


def _value(job: RLHFJob, path: str) -> Any:
    """Of a field of the spec, such as model.drafter."""
    block: Any = job.spec
    for name in path.split("."):
        block = getattr(block, to_snake(name))
    return block


def _check_generation(job: RLHFJob) -> Iterator[Finding]:
    generation = job.spec.generation
    longest = job.spec.dataset.max_prompt_tokens + generation.max_tokens
    if generation.kv_cache_tokens is not None and generation.kv_cache_tokens < longest:
        yield Finding(
            field="spec.generation.kvCacheTokens", value=generation.kv_cache_tokens,
            problem=f"one response does not fit: must be >= dataset.maxPromptTokens + generation.maxTokens ({longest})",
            depends_on=("spec.dataset.maxPromptTokens", "spec.generation.maxTokens"),
        )  # fmt: skip


def _check_rewards(job: RLHFJob) -> Iterator[Finding]:
    sources, path = job.spec.rewards.sources, "spec.rewards.sources"
    for index, source in enumerate(sources):
        yield from _check_source(source, f"{path}[{index}]", job.spec.roles.reward)
    counts = Counter(map(_shown_name, sources))
    for index, source in enumerate(sources):
        name = _shown_name(source)
        if counts[name] > 1 and name not in map(_shown_name, sources[:index]):
            field = f"{path}[{index}].name"
            yield Finding(
                field=field, value=shown_url(name), problem=f"{counts[name]} sources share it; give each its own name"
            )
    zero = [index for index, source in enumerate(sources) if source.weight == 0]
    if len(zero) == len(sources) or (zero and job.spec.rewards.combine == "product"):
        problem = "the reward would always be 0: give a weight other than 0"
        yield Finding(
            field=f"{path}[{zero[0]}].weight", value=0.0, problem=problem, depends_on=("spec.rewards.combine",)
        )


def _check_source(source: RewardSource, path: str, role: Workers) -> Iterator[Finding]:
    if isinstance(source, FunctionSource) and not MODULE_MEMBER.match(source.function):
        yield Finding(
            field=f"{path}.function", value=source.function,
            problem="must be module:function, such as rewards:exact for the function exact in rewards.py",
        )  # fmt: skip
    if isinstance(source, FunctionSource) and source.batched and role.workers > 1:
        yield Finding(
            field=f"{path}.batched", value=True, depends_on=("spec.roles.reward.workers",),
            problem="a whole group must meet in one place: must be false, or roles.reward.workers 1",
        )  # fmt: skip
    longest = source.timeout_seconds * (source.retries + 1)
    if longest >= role.deadline_seconds:
        yield Finding(
            field=f"{path}.timeoutSeconds", value=source.timeout_seconds,
            problem=f"with {source.retries} retries a sample may take {longest:g} s, over roles.reward.deadlineSeconds "
            f"({role.deadline_seconds:g}): lower it, or raise the deadline",
            depends_on=(f"{path}.retries", "spec.roles.reward.deadlineSeconds"),
        )  # fmt: skip


def _shown_name(source: RewardSource) -> str:
    if source.name is not None:
        return source.name
    return getattr(source, {"function": "function", "model": "path", "http": "url"}[source.type])  # type: ignore[no-any-return]


def _check_training(job: RLHFJob) -> Iterator[Finding]:
    training, path = job.spec.training, "spec.training"
    num_samples = training.prompts_per_step * job.spec.algorithm.samples_per_prompt
    if num_samples < training.mini_batches:
        yield Finding(
            field=f"{path}.miniBatches", value=training.mini_batches,
            problem=f"a step has {num_samples} samples (promptsPerStep * samplesPerPrompt): must be <= {num_samples}",
            depends_on=(f"{path}.promptsPerStep", "spec.algorithm.samplesPerPrompt"),
        )  # fmt: skip
    names = {
        "optimizer.name": training.optimizer.name,
        "criticOptimizer.name": training.critic_optimizer.name,
        "schedule.name": training.schedule.name,
    }
    for field, name in names.items():
        if not CLASS.match(name):
            yield Finding(
                field=f"{path}.{field}", value=name, problem="must be a class of torch, or module:Class of your own"
            )
    lora = job.spec.model.lora
    if lora is not None and lora.target_modules == []:
        yield Finding(field="spec.model.lora.targetModules", problem="must name a layer, or be all-linear")


def _check_exact_on_policy(job: RLHFJob) -> Iterator[Finding]:
    """Its log-probs are the engine's to the bit only if nothing between the two differs."""
    training, model = job.spec.training, job.spec.model
    if not training.exact_on_policy:
        return
    exact = ("spec.training.exactOnPolicy",)
    if training.autocast != "off":
        problem = "exactOnPolicy computes as the engine does: must be off"
        yield Finding(field="spec.training.autocast", value=training.autocast, problem=problem, depends_on=exact)
    if model.lora is not None and model.lora.dropout > 0:
        problem = "exactOnPolicy has no room for chance: must be 0"
        yield Finding(field="spec.model.lora.dropout", value=model.lora.dropout, problem=problem, depends_on=exact)
    if model.dtype != "float32":
        problem = "exactOnPolicy trains float32 weights: must be float32; generation.dtype is free"
        yield Finding(field="spec.model.dtype", value=model.dtype, problem=problem, depends_on=exact)


def _check_generators(job: RLHFJob) -> Iterator[Finding]:
    generator, path = job.spec.roles.generator, "spec.roles.generator"
    replicas = generator.replicas
    if replicas is None:
        return
    if replicas.max < replicas.min:
        problem = f"must be >= replicas.min ({replicas.min})"
        yield Finding(
            field=f"{path}.replicas.max", value=replicas.max, problem=problem, depends_on=(f"{path}.replicas.min",)
        )
    elif not replicas.min <= generator.workers <= replicas.max:
        yield Finding(
            field=f"{path}.workers", value=generator.workers, depends_on=(f"{path}.replicas",),
            problem=f"is what the job begins with: must be within replicas ({replicas.min} to {replicas.max})",
        )  # fmt: skip
    if job.spec.rebalance.mode == "off":
        yield Finding(
            field="spec.rebalance.mode", value="off", depends_on=(f"{path}.replicas",),
            problem="roles.generator.replicas follow the rebalancer's advice: must be auto, or remove replicas",
        )  # fmt: skip


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
            yield Finding(field=f"{path}.metadata.{kind}", problem="must be a block of names and texts")
        elif any(name.startswith(OWN_LABELS) for name in texts):
            problem = f"{OWN_LABELS}... are the operator's own; take another name"
            yield Finding(field=f"{path}.metadata.{kind}", problem=problem)
    if pod.get("restartPolicy", "Never") != "Never":
        problem = "failurePolicy decides on restarts; remove it"
        yield Finding(field=f"{path}.spec.restartPolicy", problem=problem)
    for kind in ("containers", "initContainers", "volumes"):
        items = pod.get(kind, [])
        if not isinstance(items, list) or not all(isinstance(item, dict) and item.get("name") for item in items):
            problem = "must be a list of blocks with a name each: they are merged by it"
            yield Finding(field=f"{path}.spec.{kind}", problem=problem)


def _check_storage(storage: Storage) -> Iterator[Finding]:
    folder = storage.run_folder
    if folder is not None and (folder.startswith("/") or ".." in folder.split("/")):
        problem = "must be a folder within the claim, such as runs/mine"
        yield Finding(field="spec.storage.runFolder", value=folder, problem=problem)
    if storage.uri is not None and storage.claim is not None:
        problem = "is in place of a claim: remove one of the two"
        yield Finding(field="spec.storage.uri", value=storage.uri, problem=problem)
    if storage.secret is not None and storage.uri is None:
        yield Finding(field="spec.storage.secret", value=storage.secret, problem="needs storage.uri; remove it")


def _check_cluster(job: RLHFJob) -> Iterator[Finding]:
    spec = job.spec
    gang = ("spec.scheduling.gang",)
    if spec.scheduling.queue is not None and spec.scheduling.gang not in ("kueue", "volcano"):
        yield Finding(
            field="spec.scheduling.queue", value=spec.scheduling.queue, depends_on=gang,
            problem="needs scheduling.gang: kueue or volcano; remove it, or name one",
        )  # fmt: skip
    if spec.restart.roles and not spec.restart.id:
        yield Finding(field="spec.restart.id", problem="give restart.roles an id, such as the date: a new one restarts")
    yield from _check_storage(spec.storage)
    decided: dict[tuple[str, int], int] = {}
    for index, rule in enumerate(spec.failure_policy.rules):
        pairs = [(role, code) for role in rule.roles or ("",) for code in rule.exit_codes]
        first = [decided.get(pair, decided.get(("", pair[1]), index)) for pair in pairs]
        if all(earlier < index for earlier in first):
            field, problem = f"spec.failurePolicy.rules[{index}]", f"never applies: rules[{first[0]}] decides before it"
            yield Finding(field=field, problem=problem)
        for pair in pairs:
            decided.setdefault(pair, index)

"""The one table of what contradicts itself in a job: `checks` asks it of a job, an API server by `cluster.crd_rules`.

Example:
    >>> rule = next(rule for rule in RULES if rule.field == "storage.secret")
    >>> rule.holds.cel, rule.problem
    ('!self.spec.?storage.?secret.hasValue() || self.spec.?storage.?uri.hasValue()', 'needs storage.uri; remove it')
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

from rlhfspec.job import Spec
from rlhfspec.job.choices.algorithms import ALGORITHMS
from rlhfspec.job.choices.engines import ENGINES
from rlhfspec.job.choices.of_a_job import CHOICES
from rlhfspec.job.file.rules.finding import Finding
from rlhfspec.job.file.rules.terms import Term, field, given, info_of, is_set, of_algorithm, value_at

CLASS = re.compile(r"^([A-Za-z_]\w*(\.[A-Za-z_]\w*)*:)?[A-Za-z_]\w*$")
_VALUES = re.compile(r"\{([A-Za-z.]+)\}")
_ASIDE = re.compile(r" \([^()]*\{[^()]*\)")  # in parentheses, and with values


@dataclass(frozen=True, kw_only=True)
class JobRule:
    """`problem` is said of the field when `holds` does not. It may show values: of a field, {algorithm.name}, or of
    one of `values`. An API server cannot, and leaves them out, or says `in_cluster`."""

    field: str
    holds: Term
    problem: str
    in_cluster: str = ""
    shows_value: bool = True  # of the field
    values: Mapping[str, Term] = dataclass_field(default_factory=dict)

    @property
    def message(self) -> str:
        """
        >>> JobRule(field="", holds=field("suspend"), problem="{algorithm.name}: must be < b ({b.c})").message
        'this algorithm: must be < b'
        """
        return self.in_cluster or _ASIDE.sub("", self.problem).replace("{algorithm.name}", "this algorithm")

    def finding(self, spec: Spec) -> Finding:
        value = value_at(spec, self.field)
        others = (path for path in self.holds.fields if path != self.field)
        return Finding(
            field=f"spec.{self.field}",
            value=value if self.shows_value and isinstance(value, str | int | float) else None,
            problem=_VALUES.sub(lambda at: str(self._value(spec, at[1])), self.problem),
            depends_on=tuple(f"spec.{path}" for path in others),
        )

    def _value(self, spec: Spec, name: str) -> Any:
        return self.values[name].value(spec) if name in self.values else value_at(spec, name)


def _is_of(names: tuple[str, ...]) -> Term:
    """The algorithm is one of these."""
    name = field("algorithm.name")
    return name.equals(names[0]) if len(names) == 1 else name.is_in(names)


_GROUP = _is_of(ALGORITHMS.where(lambda entry: entry.compares_responses))
_WITH_CRITIC = ALGORITHMS.where(lambda entry: entry.has_critic)
_CRITIC = _is_of(_WITH_CRITIC)
_NO_CRITIC = f"{{algorithm.name}} has no critic: remove it, or take algorithm.name: {' or '.join(_WITH_CRITIC)}"
_INEXACT = ~field("training.exactOnPolicy")


def _no_engine_is(name: str) -> Term:
    return field("generation.engine.name").differs_from(name)


def _data() -> list[JobRule]:
    return [
        JobRule(
            field="dataset.messagesColumn",
            holds=~(is_set("dataset.promptColumn") & is_set("dataset.messagesColumn")),
            problem="prompts are text or messages, not both: remove it, or promptColumn",
        )
    ]


def _algorithm() -> list[JobRule]:
    clips = [
        JobRule(
            field=f"algorithm.{clip}",
            holds=field(f"algorithm.{clip}").differs_from(0.0),
            problem="0 clips every ratio: must be > 0, such as 0.2",
        )
        for clip in ("clipLow", "clipHigh")
    ]
    return [
        JobRule(
            field="algorithm.samplesPerPrompt",
            holds=~_GROUP | (of_algorithm("algorithm.samplesPerPrompt") >= 2),
            problem="{algorithm.name} compares the responses to one prompt: must be >= 2",
        ),
        JobRule(
            field="algorithm.dynamicSampling",
            holds=_GROUP | ~field("algorithm.dynamicSampling"),
            problem="replaces groups of equal rewards, and {algorithm.name} has no groups: must be false",
        ),
        JobRule(
            field="algorithm.overlongBuffer",
            holds=field("algorithm.overlongBuffer") < field("generation.maxTokens"),
            problem="must be < generation.maxTokens ({generation.maxTokens})",
        ),
        *clips,
    ]


def _critic() -> list[JobRule]:
    """What is set for a critic would be silently ignored by an algorithm without one."""
    path = "training.criticOptimizer"
    default = info_of(path).default
    same = given(f"{path}.name").equals(default.name) & given(f"{path}.learningRate").equals(default.learning_rate)
    is_default = Term(same.cel, lambda spec: value_at(spec, path) == default, (path,), same.binds)
    settings = ("algorithm.gaeLambda", "algorithm.valueClip", "algorithm.valueCoefficient")
    clip = "algorithm.valueClip"
    return [
        *(
            JobRule(field=each, holds=_CRITIC | field(each).equals(info_of(each).default), problem=_NO_CRITIC)
            for each in settings
        ),
        JobRule(
            field=clip, holds=~_CRITIC | field(clip).differs_from(0.0), problem="0 clips every value: must be > 0"
        ),
        JobRule(field="model.critic", holds=_CRITIC | ~is_set("model.critic"), problem=_NO_CRITIC),
        JobRule(field=path, holds=_CRITIC | ~is_set(path) | is_default, problem=_NO_CRITIC),
    ]  # fmt: skip


def _choices() -> list[JobRule]:
    """What is chosen by name may need another field."""
    return [
        JobRule(
            field=registry.field,
            holds=field(registry.field).differs_from(name) | is_set(need),
            problem=registry.missing(need),
        )
        for registry in CHOICES
        for name, entry in registry.items()
        for need in entry.needs
    ]


def _generation() -> list[JobRule]:
    tokens = "generation.kvCacheTokens"
    longest = field("dataset.maxPromptTokens") + field("generation.maxTokens")
    return [
        JobRule(
            field=tokens,
            holds=~is_set(tokens) | (given(tokens) >= longest),
            problem="one response does not fit: must be >= dataset.maxPromptTokens + generation.maxTokens ({longest})",
            values={"longest": longest},
        )
    ]


def _training() -> list[JobRule]:
    samples = field("training.promptsPerStep") * of_algorithm("algorithm.samplesPerPrompt")
    classes = ("training.optimizer.name", "training.criticOptimizer.name", "training.schedule.name")
    return [
        JobRule(
            field="training.miniBatches",
            holds=field("training.miniBatches") <= samples,
            problem="a step has {samples} samples (promptsPerStep * samplesPerPrompt): must be <= {samples}",
            in_cluster="must be at most a step's samples (promptsPerStep * samplesPerPrompt)",
            values={"samples": samples},
        ),
        *(
            JobRule(
                field=path,
                holds=~is_set(path) | given(path).matches(CLASS),
                problem="must be a class of torch, or module:Class of your own",
            )
            for path in classes
        ),
    ]


def _exact() -> list[JobRule]:
    """Its log-probs are the engine's to the bit only if nothing between the two differs."""
    return [
        JobRule(
            field="training.autocast",
            holds=_INEXACT | field("training.autocast").differs_from("bfloat16"),
            problem="exactOnPolicy computes as the engine does: must be off",
        ),
        JobRule(
            field="training.activationCheckpointing",
            holds=_INEXACT | ~field("training.activationCheckpointing").equals("on"),
            problem="exactOnPolicy runs on the CPU, and keeps what it computes: must not be on",
        ),
        JobRule(
            field="roles.generator.tensorParallel",
            holds=_INEXACT | field("roles.generator.tensorParallel").equals(1),
            problem="exactOnPolicy computes as the engine does, and parts add up in another order: must be 1",
        ),
        JobRule(
            field="model.lora.dropout",
            holds=_INEXACT | ~is_set("model.lora") | given("model.lora.dropout").equals(0.0),
            problem="exactOnPolicy has no room for chance: must be 0",
        ),
        JobRule(
            field="model.dtype",
            holds=_INEXACT | field("model.dtype").differs_from("bfloat16"),
            problem="exactOnPolicy trains float32 weights: must be float32; generation.dtype is free",
            in_cluster="exactOnPolicy trains float32 weights: must be float32",
        ),
        *(
            JobRule(
                field="generation.engine.name",
                holds=_INEXACT | _no_engine_is(name),
                problem="exactOnPolicy needs an engine with the trainer's own bits: must be own",
            )
            for name in ENGINES.where(lambda entry: not entry.is_exact)
        ),
        *(
            JobRule(
                field=f"roles.trainer.{name}",
                holds=_INEXACT | field(f"roles.trainer.{name}").equals(1),
                problem="exactOnPolicy runs on one rank: must be 1",
            )
            for name in ("nodes", "ranksPerNode")
        ),
    ]


def _ranks() -> list[JobRule]:
    ranks, parallel = "roles.trainer.ranksPerNode", "roles.trainer.tensorParallel"
    return [
        JobRule(
            field=parallel,
            holds=(field(ranks) % field(parallel)).equals(0),
            problem=f"must divide ranksPerNode ({{{ranks}}})",
        ),
        JobRule(
            field=parallel,
            holds=field(parallel).equals(1) | ~is_set("model.lora"),
            problem="updates of low rank are not cut: must be 1 with model.lora",
        ),
    ]


def _generators() -> list[JobRule]:
    replicas, workers = "roles.generator.replicas", "roles.generator.workers"
    parallel = "roles.generator.tensorParallel"
    fixed, least, most = ~is_set(replicas), given(f"{replicas}.min"), given(f"{replicas}.max")
    return [
        JobRule(
            field=f"{replicas}.max",
            holds=fixed | (most >= least),
            problem=f"must be >= replicas.min ({{{replicas}.min}})",
        ),
        JobRule(
            field=workers,
            holds=fixed | (most < least) | ((field(workers) >= least) & (field(workers) <= most)),
            problem=f"is what the job begins with: must be within replicas ({{{replicas}.min}} to {{{replicas}.max}})",
        ),
        JobRule(
            field="rebalance.mode",
            holds=fixed | field("rebalance.mode").differs_from("off"),
            problem="roles.generator.replicas follow the rebalancer's advice: must be auto, or remove replicas",
        ),
        *(
            JobRule(
                field=replicas,
                holds=fixed | _no_engine_is(name),
                problem=f"follow the rebalancer's advice, and samples of the engine {name} do not move: remove it",
            )
            for name in ENGINES.where(lambda entry: not entry.is_movable)
        ),
        *(
            JobRule(
                field=parallel,
                holds=field(parallel).equals(1) | _no_engine_is(name),
                problem=f"the engine {name} has no parts: must be 1",
            )
            for name in ENGINES.where(lambda entry: not (entry.takes_a_group or entry.divides_models))
        ),
    ]


def _cluster() -> list[JobRule]:
    queue, folder, uri = "scheduling.queue", "storage.runFolder", "storage.uri"
    outside = given(folder).starts_with("/") | given(folder).has_part("..", between="/")
    return [
        JobRule(
            field=queue,
            holds=~is_set(queue) | field("scheduling.gang").is_in(["kueue", "volcano"]),
            problem="needs scheduling.gang: kueue or volcano; remove it, or name one",
        ),
        JobRule(
            field="restart.id",
            holds=field("restart.roles").is_empty() | field("restart.id").differs_from(""),
            problem="give restart.roles an id, such as the date: a new one restarts",
            shows_value=False,
        ),
        JobRule(
            field=folder,
            holds=~is_set(folder) | ~outside,
            problem="must be a folder within the claim, such as runs/mine",
        ),
        JobRule(
            field=uri,
            holds=~is_set(uri) | ~is_set("storage.claim"),
            problem="is in place of a claim: remove one of the two",
        ),
        JobRule(
            field="storage.secret",
            holds=~is_set("storage.secret") | is_set(uri),
            problem="needs storage.uri; remove it",
        ),
    ]


RULES: tuple[JobRule, ...] = (
    *_data(), *_algorithm(), *_critic(), *_choices(), *_generation(), *_training(), *_exact(), *_ranks(),
    *_generators(), *_cluster(),
)  # fmt: skip

"""Table of contradictions in a job, evaluated by `checks` and translated to CEL by `cluster.crd_rules`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlhfspec.job import Spec
from rlhfspec.job.choices import CHOICES
from rlhfspec.job.choices.algorithms import ALGORITHMS
from rlhfspec.job.choices.drafters import AUTO, MADE_OF_THE_POLICY, OFF, ONLY_HEADS_LEARN
from rlhfspec.job.choices.engines import ENGINES
from rlhfspec.job.file.problems import Finding
from rlhfspec.job.file.rules.condition import fields_of, info_of, value_at, value_of

CLASS = r"^([A-Za-z_]\w*(\.[A-Za-z_]\w*)*:)?[A-Za-z_]\w*$"
_VALUES = re.compile(r"\{([^{}]+)\}")
_ASIDE = re.compile(r" \([^()]*\{[^()]*\)")  # parentheses that contain values


@dataclass(frozen=True)
class JobRule:
    """Rule that reports `problem` at `field` if the condition `holds` is false (syntax: condition.py).

    `problem` may contain values, such as {algorithm.name}, which the API server's message omits.
    """

    field: str
    holds: str
    problem: str
    in_cluster: str = ""
    shows_value: bool = True  # of the field

    @property
    def message(self) -> str:
        """Return the message that API servers show, without values.

        >>> JobRule("a.b", "a.b < a.c", "{algorithm.name}: must be < c ({a.c})").message
        'this algorithm: must be < c'
        """
        return self.in_cluster or _ASIDE.sub("", self.problem).replace("{algorithm.name}", "this algorithm")

    def is_kept(self, spec: Spec) -> bool:
        return bool(value_of(self.holds, spec))

    def finding(self, spec: Spec) -> Finding:
        value = value_at(spec, self.field)
        others = (path for path in fields_of(self.holds) if path != self.field)
        return Finding(
            field=f"spec.{self.field}",
            value=value if self.shows_value and isinstance(value, str | int | float) else None,
            problem=_VALUES.sub(lambda shown: str(value_of(shown[1], spec)), self.problem),
            depends_on=tuple(f"spec.{path}" for path in others),
        )


_WITH_CRITIC = ALGORITHMS.where(lambda entry: entry.has_critic)
_IN_GROUPS = f"algorithm.name in {ALGORITHMS.where(lambda entry: entry.compares_responses)}"
_HAS_CRITIC = f"algorithm.name in {_WITH_CRITIC}"
_NO_CRITIC = f"{{algorithm.name}} has no critic: remove it, or use algorithm.name: {' or '.join(_WITH_CRITIC)}"
_CRITIC = info_of("training.criticOptimizer").default
_SAMPLES = "training.promptsPerStep * algorithm.samplesPerPrompt"
_LONGEST = "dataset.maxPromptTokens + generation.maxTokens"

_OF_ALGORITHMS = (
    JobRule(
        "algorithm.samplesPerPrompt",
        f"not {_IN_GROUPS} or algorithm.samplesPerPrompt >= 2",
        "{algorithm.name} compares the responses to one prompt: must be >= 2",
    ),
    JobRule(
        "algorithm.dynamicSampling",
        f"{_IN_GROUPS} or not algorithm.dynamicSampling",
        "replaces groups of equal rewards, and {algorithm.name} has no groups: must be false",
    ),
    JobRule(
        "algorithm.overlongBuffer",
        "algorithm.overlongBuffer < generation.maxTokens",
        "must be < generation.maxTokens ({generation.maxTokens})",
    ),
    JobRule(
        "training.stopOnCollapse",
        "not training.stopOnCollapse or evaluation.everySteps is not None",
        "must be false without evaluation, which detects a collapse",
    ),
    *(
        JobRule(f"algorithm.{clip}", f"algorithm.{clip} != 0.0", "0 clips every ratio: must be > 0, such as 0.2")
        for clip in ("clipLow", "clipHigh")
    ),
    # An algorithm without a critic would silently ignore settings for one.
    *(
        JobRule(path, f"{_HAS_CRITIC} or {path} == {info_of(path).default}", _NO_CRITIC)
        for path in ("algorithm.gaeLambda", "algorithm.valueClip", "algorithm.valueCoefficient")
    ),
    JobRule(
        "algorithm.valueClip", f"not {_HAS_CRITIC} or algorithm.valueClip != 0.0", "0 clips every value: must be > 0"
    ),
    JobRule("model.critic", f"{_HAS_CRITIC} or model.critic is None", _NO_CRITIC),
    JobRule(
        "training.criticOptimizer",
        f"{_HAS_CRITIC} or training.criticOptimizer is None or (training.criticOptimizer.name == '{_CRITIC.name}' and "
        f"training.criticOptimizer.learningRate == {_CRITIC.learning_rate})",
        _NO_CRITIC,
    ),
)

_OF_SIZES = (
    JobRule(
        "generation.kvCacheTokens",
        f"generation.kvCacheTokens is None or generation.kvCacheTokens >= {_LONGEST}",
        f"one response does not fit: must be >= {_LONGEST} ({{{_LONGEST}}})",
    ),
    JobRule(
        "training.miniBatches",
        f"training.miniBatches <= {_SAMPLES}",
        f"a step has {{{_SAMPLES}}} samples (promptsPerStep * samplesPerPrompt): must be <= {{{_SAMPLES}}}",
        in_cluster="must be at most a step's samples (promptsPerStep * samplesPerPrompt)",
    ),
    JobRule(
        "roles.trainer.tensorParallel",
        "roles.trainer.ranksPerNode % roles.trainer.tensorParallel == 0",
        "must divide ranksPerNode ({roles.trainer.ranksPerNode})",
    ),
)

_OF_NAMES = (
    JobRule(
        "dataset.messagesColumn",
        "not (dataset.promptColumn is not None and dataset.messagesColumn is not None)",
        "prompts are text or messages, not both: remove it, or promptColumn",
    ),
    *(
        JobRule(registry.field, f"{registry.field} != '{name}' or {need} is not None", registry.missing(need))
        for registry in CHOICES
        for name, entry in registry.items()
        for need in entry.needs
    ),
    *(
        JobRule(
            path,
            f"{path} is None or matches({path}, {CLASS!r})",
            "must be a class of torch, or module:Class of your own",
        )
        for path in ("training.optimizer.name", "training.criticOptimizer.name", "training.schedule.name")
    ),
)

# Log-probs equal the engine's bit for bit only if both compute in the same way.
_OF_EXACT_ON_POLICY = tuple(
    JobRule(path, f"not training.exactOnPolicy or {holds}", f"exactOnPolicy {problem}")
    for path, holds, problem in (
        ("training.autocast", "training.autocast != 'bfloat16'", "computes as the engine does: must be off"),
        (
            "training.activationCheckpointing",
            "training.activationCheckpointing != 'on'",
            "runs on the CPU and stores all activations: must not be on",
        ),
        (
            "roles.generator.tensorParallel",
            "roles.generator.tensorParallel == 1",
            "does not support tensor parallelism, which adds in another order: must be 1",
        ),
        ("model.lora.dropout", "model.lora is None or model.lora.dropout == 0.0", "does not allow dropout: must be 0"),
        (
            "model.dtype",
            "model.dtype != 'bfloat16'",
            "trains float32 weights: must be float32; generation.dtype may differ",
        ),
        *(
            (
                "generation.engine.name",
                f"generation.engine.name != '{name}'",
                "needs an engine that equals the trainer bit for bit: must be own",
            )
            for name in ENGINES.where(lambda entry: not entry.is_exact)
        ),
        ("roles.trainer.nodes", "roles.trainer.nodes == 1", "runs on one rank: must be 1"),
        ("roles.trainer.ranksPerNode", "roles.trainer.ranksPerNode == 1", "runs on one rank: must be 1"),
    )
)

_NEEDS_NO_COPY = (
    f"model.drafter is None or model.drafter not in {MADE_OF_THE_POLICY} or "
    f"(model.drafter == '{AUTO}' and generation.speculation.mode != 'model')"
)

_OF_GENERATORS = (
    JobRule(
        "generation.speculation.learning",
        f"generation.speculation.learning == '{OFF}' or "
        f"(model.drafter is not None and model.drafter not in {MADE_OF_THE_POLICY})",
        ONLY_HEADS_LEARN,
    ),
    *(
        JobRule("model.drafter", f"{_NEEDS_NO_COPY} or {holds}", problem)
        for holds, problem in (
            (
                "generation.engine.name == 'own'",
                "the drafter ({model.drafter}) needs the engine own: name a model, or use that engine",
            ),
            (
                "roles.generator.tensorParallel == 1",
                "the drafter ({model.drafter}) does not support tensor parallelism: "
                "roles.generator.tensorParallel must be 1",
            ),
        )
    ),
    JobRule(
        "serving.targetTpotMilliseconds",
        "serving.targetTpotMilliseconds is None or generation.engine.name == 'own'",
        "needs the engine own, in which samples pause for clients: remove it",
    ),
    JobRule(
        "roles.trainer.tensorParallel",
        "roles.trainer.tensorParallel == 1 or model.lora is None",
        "LoRA does not support tensor parallelism: must be 1 with model.lora",
    ),
    JobRule(
        "roles.generator.replicas.max",
        "roles.generator.replicas is None or roles.generator.replicas.max >= roles.generator.replicas.min",
        "must be >= replicas.min ({roles.generator.replicas.min})",
    ),
    JobRule(
        "roles.generator.workers",
        "roles.generator.replicas is None or roles.generator.replicas.max < roles.generator.replicas.min or "
        "roles.generator.replicas.min <= roles.generator.workers <= roles.generator.replicas.max",
        "is the initial number of generators: must be within replicas "
        "({roles.generator.replicas.min} to {roles.generator.replicas.max})",
    ),
    JobRule(
        "roles.gateway.workers",
        "roles.gateway.workers == 0 or generation.engine.name == 'own'",
        "calls the engine own only: must be 0",
    ),
    JobRule(
        "rebalance.mode",
        "roles.generator.replicas is None or rebalance.mode != 'off'",
        "roles.generator.replicas needs the rebalancer: must be auto, or remove replicas",
    ),
    *(
        JobRule(
            "roles.generator.replicas",
            f"roles.generator.replicas is None or generation.engine.name != '{name}'",
            f"needs the rebalancer, and samples of the engine {name} cannot move: remove it",
        )
        for name in ENGINES.where(lambda entry: not entry.is_movable)
    ),
    JobRule(
        "roles.generator.prefillWorkers",
        "roles.generator.prefillWorkers == 0 or roles.generator.prefillWorkers < roles.generator.workers",
        "leaves no worker to decode: must be less than roles.generator.workers ({roles.generator.workers})",
    ),
    JobRule(
        "roles.generator.prefillWorkers",
        "roles.generator.prefillWorkers == 0 or generation.engine.name == 'own'",
        "needs the engine own, whose samples move with their KV: must be 0",
    ),
    JobRule(
        "roles.generator.prefillWorkers",
        "roles.generator.prefillWorkers == 0 or roles.generator.replicas is None",
        "needs a fixed number of generators: must be 0 with roles.generator.replicas",
    ),
    *(
        JobRule(
            "roles.generator.tensorParallel",
            f"roles.generator.tensorParallel == 1 or generation.engine.name != '{name}'",
            f"the engine {name} does not support tensor parallelism: must be 1",
        )
        for name in ENGINES.where(lambda entry: not (entry.takes_a_group or entry.divides_models))
    ),
)

_OF_A_CLUSTER = (
    JobRule(
        "scheduling.queue",
        "scheduling.queue is None or scheduling.gang in ['kueue', 'volcano']",
        "needs scheduling.gang: kueue or volcano; remove it, or name one",
    ),
    JobRule(
        "restart.id",
        "size(restart.roles) == 0 or restart.id != ''",
        "must be set with restart.roles, such as to the date; a new id restarts them",
        shows_value=False,
    ),
    JobRule(
        "storage.runFolder",
        "storage.runFolder is None or not (starts_with(storage.runFolder, '/') or "
        "has_part(storage.runFolder, '/', '..'))",
        "must be a folder within the claim, such as runs/mine",
    ),
    JobRule(
        "storage.uri",
        "storage.uri is None or storage.claim is None",
        "cannot be set together with storage.claim: remove one of the two",
    ),
    JobRule("storage.secret", "storage.secret is None or storage.uri is not None", "needs storage.uri; remove it"),
)

RULES = (*_OF_ALGORITHMS, *_OF_SIZES, *_OF_NAMES, *_OF_EXACT_ON_POLICY, *_OF_GENERATORS, *_OF_A_CLUSTER)

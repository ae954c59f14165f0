"""What contradicts itself in a job, and what cannot change once it has started, in the API server's language (CEL).

The first are those of `job_file.checks` that CEL can say; both are tried on the same jobs (tests/test_job_cluster.py).
An API server fills in the defaults of fields, but not of blocks left out: every value is read with its default.

Example:
    >>> value("generation.maxTokens"), value("model.critic")
    ('self.spec.?generation.?maxTokens.orValue(256)', 'self.spec.?model.?critic')
    >>> is_set("model.critic")
    'self.spec.?model.?critic.hasValue()'
"""

from __future__ import annotations

import json
from typing import Any

from pydantic.fields import FieldInfo

from rlhfspec.choices.algorithms import ALGORITHMS
from rlhfspec.choices.of_a_job import CHOICES
from rlhfspec.job import Algorithm, Optimizer, Spec
from rlhfspec.job_block import Block, Mark, blocks_of, marked
from rlhfspec.job_cluster import OPERATOR
from rlhfspec.job_file.checks import CLASS, MODULE_MEMBER, OWN_LABELS, REMOVE_OR_TAKE_A_CRITIC, WITH_CRITIC
from rlhfspec.job_file.schema import in_cel

MUTABLE = tuple(marked(Spec, Mark.MUTABLE))
OF_PODS = tuple(marked(Spec, Mark.MUTABLE_WHILE_SUSPENDED))
_HAS_STARTED = "has(oldSelf.status) && has(oldSelf.status.startTime)"
# Rules at every field of these; of other blocks, at theirs.
_DEEPER = ("roles",)


def job_rules(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """At the root of the schema: from nowhere else status and spec are both seen."""
    return [*_contradictions(), _one_manager(), *_immutable(schema["properties"]["spec"])]


def _one_manager() -> dict[str, Any]:
    """From its first moment on: two that manage one job would undo each other's work."""
    has, had = _is_there("self", "managedBy"), _is_there("oldSelf", "managedBy")
    same = f"({has} ? self.spec.managedBy : {_text(OPERATOR)}) == ({had} ? oldSelf.spec.managedBy : {_text(OPERATOR)})"
    return _rule(same, "cannot be changed; make another job", ".spec.managedBy")


def source_rules() -> list[dict[str, Any]]:
    """At every reward source."""
    function = f"self.{in_cel('function')}"
    return [
        _rule(
            f"!has({function}) || {function}.matches({_text(MODULE_MEMBER.pattern)})",
            "must be module:function, such as rewards:exact for the function exact in rewards.py",
            ".function",
        )
    ]


def template_rules() -> list[dict[str, Any]]:
    """At the metadata of every podTemplate."""
    own = _text(OWN_LABELS)
    return [
        _rule(
            f"!has(self.{kind}) || self.{kind}.all(name, !name.startsWith({own}))",
            f"{OWN_LABELS}... are the operator's own; take another name",
            f".{kind}",
        )
        for kind in ("labels", "annotations")
    ]


def value(path: str) -> str:
    """The CEL of a field of spec, or of its default where it is left out."""
    selected = "self.spec.?" + path.replace(".", ".?")
    default = _field(path).default
    return selected if default is None or isinstance(default, Block) else f"{selected}.orValue({json.dumps(default)})"


def is_set(path: str) -> str:
    """Neither left out nor null, which is the same here."""
    return f"self.spec.?{path.replace('.', '.?')}.hasValue()"


def _field(path: str) -> FieldInfo:
    block: type[Block] = Spec
    *outer, last = path.split(".")
    for name in outer:
        block = blocks_of(_named(block, name).annotation)[0]
    return _named(block, last)


def _named(block: type[Block], camel: str) -> FieldInfo:
    return next(field for field in block.model_fields.values() if field.alias == camel)


def _rule(rule: str, message: str, field: str) -> dict[str, Any]:
    return {"rule": rule, "message": message, "fieldPath": field}


def _text(text: str) -> str:
    return json.dumps(text)


def _contradictions() -> list[dict[str, Any]]:
    groups = [
        _in_data(), _in_algorithm(), _of_a_critic(), _in_generation(), _in_rewards(), _in_training(),
        _exactly_on_policy(), _in_cluster(),
    ]  # fmt: skip
    return [_rule(rule, message, f".spec.{field}") for group in groups for field, (rule, message) in group]


Rules = list[tuple[str, tuple[str, str]]]  # field, (what must hold, what is said else)
_NAME = value("algorithm.name")
_IS_GROUP = f"{_NAME} in {json.dumps(ALGORITHMS.where(lambda entry: entry.compares_responses))}"


def _of_algorithm(path: str) -> str:
    """A field whose default depends on the algorithm."""
    snake = next(name for name, field in _BLOCK_OF_ALGORITHM.items() if field.alias == path.partition(".")[2])
    own: dict[str, list[str]] = {}
    for name, entry in ALGORITHMS.items():
        if snake in entry.defaults:
            own.setdefault(json.dumps(entry.defaults[snake]), []).append(name)
    chosen = json.dumps(_BLOCK_OF_ALGORITHM[snake].default)
    for default, algorithms in own.items():
        chosen = f"({_NAME} in {json.dumps(algorithms)} ? {default} : {chosen})"
    return f"self.spec.?{path.replace('.', '.?')}.orValue({chosen})"


_BLOCK_OF_ALGORITHM = Algorithm.model_fields


def _in_data() -> Rules:
    prompt, messages = "dataset.promptColumn", "dataset.messagesColumn"
    return [
        (
            messages,
            (
                f"!({is_set(prompt)} && {is_set(messages)})",
                "prompts are text or messages, not both: remove it, or promptColumn",
            ),
        ),
    ]


def _in_algorithm() -> Rules:
    rules = [
        (
            "algorithm.samplesPerPrompt",
            (
                f"!({_IS_GROUP}) || {_of_algorithm('algorithm.samplesPerPrompt')} >= 2",
                "this algorithm compares the responses to one prompt: must be >= 2",
            ),
        ),
        (
            "algorithm.dynamicSampling",
            (
                f"{_IS_GROUP} || !{value('algorithm.dynamicSampling')}",
                "replaces groups of equal rewards, and this algorithm has no groups: must be false",
            ),
        ),
        (
            "algorithm.overlongBuffer",
            (
                f"{value('algorithm.overlongBuffer')} < {value('generation.maxTokens')}",
                "must be < generation.maxTokens",
            ),
        ),
    ]
    clips = [
        (f"algorithm.{clip}", (f"{value(f'algorithm.{clip}')} != 0.0", "0 clips every ratio: must be > 0, such as 0.2"))
        for clip in ("clipLow", "clipHigh")
    ]
    return rules + clips


def _of_a_critic() -> Rules:
    remove = f"this algorithm has no critic: {REMOVE_OR_TAKE_A_CRITIC}"
    other = " || ".join(f'{_NAME} == "{name}"' for name in WITH_CRITIC)
    settings = [
        (path, (f"{other} || {value(path)} == {json.dumps(_field(path).default)}", remove))
        for path in ("algorithm.gaeLambda", "algorithm.valueClip", "algorithm.valueCoefficient")
    ]
    default = _field("training.criticOptimizer").default
    assert isinstance(default, Optimizer)
    optimizer = "self.spec.training.criticOptimizer"
    same = f"({optimizer}.name == {_text(default.name)} && {optimizer}.learningRate == {default.learning_rate!r})"
    return [
        *settings,
        ("algorithm.valueClip", (f"{value('algorithm.valueClip')} != 0.0", "0 clips every value: must be > 0")),
        ("model.critic", (f"{other} || !{is_set('model.critic')}", remove)),
        (
            "training.criticOptimizer",
            (f"{other} || !self.spec.?training.?criticOptimizer.hasValue() || {same}", remove),
        ),
    ]


def _needs() -> Rules:
    return [
        (registry.field, (f'{value(registry.field)} != "{name}" || {is_set(need)}', registry.missing(need)))
        for registry in CHOICES
        for name, entry in registry.items()
        for need in entry.needs
    ]


def _in_generation() -> Rules:
    tokens = "generation.kvCacheTokens"
    longest = f"{value('dataset.maxPromptTokens')} + {value('generation.maxTokens')}"
    return [
        *_needs(),
        (
            tokens,
            (
                f"!{is_set(tokens)} || self.spec.{tokens} >= {longest}",
                "one response does not fit: must be >= dataset.maxPromptTokens + generation.maxTokens",
            ),
        ),
    ]


def _in_rewards() -> Rules:
    sources, deadline = "self.spec.rewards.sources", value("roles.reward.deadlineSeconds")
    longest = "double(s.?retries.orValue(2) + 1) * s.?timeoutSeconds.orValue(60.0)"

    owns = (in_cel("function"), "path", "url")
    derived = " || ".join(f"(has(a.{own}) && has(b.{own}) && a.{own} == b.{own})" for own in owns)
    same = f"has(a.name) ? has(b.name) && a.name == b.name : !has(b.name) && ({derived})"
    return [
        (
            "rewards.sources",
            (
                f"{value('roles.reward.workers')} == 1 || !{sources}.exists(s, s.?batched.orValue(false))",
                "batched: a whole group must meet in one place: must be false, or roles.reward.workers 1",
            ),
        ),
        (
            "rewards.sources",
            (
                f"{sources}.all(s, {longest} < {deadline})",
                "timeoutSeconds: with its retries a sample may take longer than roles.reward.deadlineSeconds: "
                "lower it, or raise the deadline",
            ),
        ),
        (
            "rewards.sources",
            (
                f"{sources}.all(a, {sources}.exists_one(b, {same}))",
                "name: several sources share it; give each its own name",
            ),
        ),
        (
            "rewards.sources",
            (
                f"{sources}.exists(s, s.?weight.orValue(1.0) != 0.0) && "
                f'({value("rewards.combine")} != "product" || {sources}.all(s, s.?weight.orValue(1.0) != 0.0))',
                "weight: the reward would always be 0: give a weight other than 0",
            ),
        ),
    ]


def _in_training() -> Rules:
    samples = f"{value('training.promptsPerStep')} * {_of_algorithm('algorithm.samplesPerPrompt')}"
    classes = [
        (
            path,
            (
                f"!self.spec.?{path.replace('.', '.?')}.hasValue() || self.spec.{path}.matches({_text(CLASS.pattern)})",
                "must be a class of torch, or module:Class of your own",
            ),
        )
        for path in ("training.optimizer.name", "training.criticOptimizer.name", "training.schedule.name")
    ]
    batches = f"{value('training.miniBatches')} <= {samples}"
    message = "must be at most a step's samples (promptsPerStep * samplesPerPrompt)"
    return [("training.miniBatches", (batches, message)), *classes]


def _exactly_on_policy() -> Rules:
    free = f"!{value('training.exactOnPolicy')}"
    lora = "self.spec.model.lora.dropout"
    return [
        (
            "training.autocast",
            (
                f'{free} || {value("training.autocast")} == "off"',
                "exactOnPolicy computes as the engine does: must be off",
            ),
        ),
        (
            "model.lora.dropout",
            (f"{free} || !{is_set('model.lora')} || {lora} == 0.0", "exactOnPolicy has no room for chance: must be 0"),
        ),
        (
            "model.dtype",
            (f'{free} || {value("model.dtype")} == "float32"', "exactOnPolicy trains float32 weights: must be float32"),
        ),
    ]


def _in_cluster() -> Rules:
    replicas, workers = "roles.generator.replicas", "roles.generator.workers"
    limits = f"self.spec.{replicas}"
    queue, folder = "scheduling.queue", "storage.runFolder"
    return [
        (f"{replicas}.max", (f"!{is_set(replicas)} || {limits}.max >= {limits}.min", "must be >= replicas.min")),
        (
            workers,
            (
                f"!{is_set(replicas)} || {limits}.max < {limits}.min || "
                f"({value(workers)} >= {limits}.min && {value(workers)} <= {limits}.max)",
                "is what the job begins with: must be within replicas",
            ),
        ),
        (
            "rebalance.mode",
            (
                f'!{is_set(replicas)} || {value("rebalance.mode")} != "off"',
                "roles.generator.replicas follow the rebalancer's advice: must be auto, or remove replicas",
            ),
        ),
        (
            queue,
            (
                f'!{is_set(queue)} || {value("scheduling.gang")} in ["kueue", "volcano"]',
                "needs scheduling.gang: kueue or volcano; remove it, or name one",
            ),
        ),
        (
            "restart.id",
            (
                f'self.spec.?restart.?roles.orValue([]).size() == 0 || {value("restart.id")} != ""',
                "give restart.roles an id, such as the date: a new one restarts",
            ),
        ),
        (
            folder,
            (
                f'!{is_set(folder)} || !(self.spec.{folder}.startsWith("/") || '
                f'self.spec.{folder}.split("/").exists(part, part == ".."))',
                "must be a folder within the claim, such as runs/mine",
            ),
        ),
        (
            "storage.uri",
            (
                f"!{is_set('storage.uri')} || !{is_set('storage.claim')}",
                "is in place of a claim: remove one of the two",
            ),
        ),
        (
            "storage.secret",
            (f"!{is_set('storage.secret')} || {is_set('storage.uri')}", "needs storage.uri; remove it"),
        ),
    ]


def _immutable(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """One rule a field, so that the one is named that was changed."""
    rules = []
    for path, default in _fields(spec, ""):
        has, had = _is_there("self", path), _is_there("oldSelf", path)
        if default is None:
            same = f"({has}) == ({had}) && (!({has}) || self.spec.{path} == oldSelf.spec.{path})"
        else:  # a block that is new, with what held before, changes nothing
            chosen = json.dumps(default)
            same = f"({has} ? self.spec.{path} : {chosen}) == ({had} ? oldSelf.spec.{path} : {chosen})"
        message = "cannot be changed once the job has started; make another job, or change it back"
        if path in OF_PODS:
            same = f"has(self.spec.suspend) && self.spec.suspend || {same}"
            message = "cannot be changed once the job has started, unless it is suspended: set spec.suspend too"
        rules.append(_rule(f"!({_HAS_STARTED}) || ({same})", message, f".spec.{path}"))
    return rules


def _is_there(root: str, path: str) -> str:
    """Said with has() at every step: through `.?` the API server loses sight of how long a value can be."""
    parts = path.split(".")
    return " && ".join(f"has({root}.spec.{'.'.join(parts[: end + 1])})" for end in range(len(parts)))


def _fields(node: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    """With their defaults; two deep, roles three. Where a field is of no type that CEL knows, its block is compared."""
    found: list[tuple[str, Any]] = []
    for name, field in node["properties"].items():
        path = f"{prefix}{name}"
        if path in MUTABLE or path == "managedBy":  # which has a rule of its own
            continue
        inner = field.get("properties", {})
        deeper = path.count(".") < (2 if path.startswith(_DEEPER) else 1)
        known = all("type" in child for child in inner.values())
        if inner and deeper and known and path not in OF_PODS and not field.get("nullable"):
            found += _fields(field, f"{path}.")
        else:
            found.append((path, field.get("default")))
    return found

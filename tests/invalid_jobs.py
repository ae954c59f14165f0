"""Jobs with one error each, from the schema and the rules, for e2e/test_crd.py and test_job_malformed.py."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rlhfspec.job.file.schema import json_schema, structural_schema
from rlhfspec.job.file.yaml_text import parts_of

REMOVED = object()
FUNCTION = {"type": "function", "function": "rewards:exact"}
HTTP = {"type": "http", "url": "http://localhost:1/"}
SOURCE = "rewards.sources[0]"
JOB: dict[str, Any] = {
    "apiVersion": "rlhfspec.io/v1alpha1",
    "kind": "RLHFJob",
    "metadata": {"name": "sums"},
    "spec": {"model": {"path": "owner/model"}, "dataset": {"path": "owner/data"}, "rewards": {"sources": [FUNCTION]}},
}
# Who refuses: both, or one of them.
By = Literal["both", "server", "checks"]


@dataclass(frozen=True, slots=True)
class Wrong:
    """A wrong job. `edits`: values by path in spec (from the top with a leading slash)."""

    edits: dict[str, Any]
    field: str
    by: By = "both"

    def __str__(self) -> str:
        return ", ".join(f"{path}={str(value)[:20]}" for path, value in self.edits.items())

    @property
    def manifest(self) -> dict[str, Any]:
        return edited(self.edits)


def edited(edits: dict[str, Any], job: dict[str, Any] = JOB) -> dict[str, Any]:
    job = copy.deepcopy(job)
    for path, value in edits.items():
        *outer, last = parts_of(path[1:] if path.startswith("/") else f"spec.{path}")
        holder: Any = job
        for part in outer:
            holder = holder[part] if isinstance(holder, list) else holder.setdefault(part, {})
        if value is REMOVED:
            del holder[last]
        else:
            holder[last] = value
    return job


def by_the_schema() -> Iterator[Wrong]:
    """Yield each field with a wrong type and beyond each bound, and each block with an unknown key."""
    for path, node in _fields(json_schema()["properties"]["spec"], ""):
        options = node.get("anyOf", [node])
        kinds = {option.get("type") for option in options}
        yield Wrong({**_around(path), path: 3 if "string" in kinds else "x"}, f"spec.{path}")
        for option in options:
            for value in _beyond(option):
                yield Wrong({**_around(path), path: value}, f"spec.{path}")
        if "properties" in node:
            yield Wrong({**_around(path), f"{path}.thisIsUnknown": 1}, f"spec.{path}.thisIsUnknown")
    for path, node in _fields(structural_schema()["properties"]["spec"], ""):
        if node.get("type") == "array" and path not in ("rewards.sources", "failurePolicy.rules"):
            item = node["items"].get("enum", [1 if node["items"]["type"] == "integer" else "x"])[0]
            by: By = "server" if path in ("generation.stop", "failurePolicy.counted") else "both"
            yield Wrong({**_around(path), path: [item] * 65}, f"spec.{path}", by)
        if node.get("maxLength") == 2048 and "pattern" not in node:
            yield Wrong({**_around(path), path: "x" * 2049}, f"spec.{path}", "server")


def _around(path: str) -> dict[str, Any]:
    """Return what the field needs beside it, so that nothing else is wrong."""
    if path.startswith("roles.generator.replicas"):
        return {"roles.generator.replicas": {"min": 1, "max": 1}}
    return {"observability.wandb": {"project": "p"}} if path.startswith("observability.wandb.") else {}


def _beyond(node: dict[str, Any]) -> Iterator[Any]:
    whole = node.get("type") == "integer"
    if "minimum" in node:
        yield node["minimum"] - 1
    if "exclusiveMinimum" in node:
        yield node["exclusiveMinimum"]
    if "maximum" in node:
        yield node["maximum"] + 1
    if "exclusiveMaximum" in node:
        yield node["exclusiveMaximum"]
    if "enum" in node or "const" in node or "pattern" in node:
        yield "no such word"
    if node.get("minLength"):
        yield ""
    if whole:
        yield 1.5
    if node.get("type") in ("integer", "number", "boolean"):
        yield []
    if node.get("type") == "object":
        yield []
    if node.get("type") == "array":
        yield {}


def _fields(node: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in node.get("properties", {}).items():
        path = f"{prefix}{name}"
        if path not in ("model.lora.targetModules",):
            yield path, field
        for inner in (field, *field.get("anyOf", [])):
            if "properties" in inner and "propertyNames" not in inner:
                yield from _fields(inner, f"{path}.")


def pod_template(role: str, **template: Any) -> dict[str, Any]:
    return {f"roles.{role}.podTemplate": template}


PPO = {"algorithm.name": "ppo"}
BY_HAND = [
    Wrong({"/apiVersion": "rlhfspec.io/v2"}, "apiVersion", "checks"),  # another resource: not asked
    Wrong({"/metadata.name": "My_Run"}, "metadata.name"),
    Wrong({"/metadata.name": "a" * 60}, "metadata.name"),
    Wrong({"/spec": REMOVED}, "spec"),
    Wrong({"/sepc": {}}, "sepc"),
    Wrong({"model": REMOVED}, "spec.model"),
    Wrong({"model.path": REMOVED}, "spec.model.path"),
    Wrong({"dataset": REMOVED}, "spec.dataset"),
    Wrong({"rewards": REMOVED}, "spec.rewards"),
    Wrong({"rewards.sources": []}, "spec.rewards.sources"),
    Wrong({"trainig": {"steps": 3}}, "spec.trainig"),
    Wrong({"dataset.promptColumn": None}, "spec.dataset.promptColumn", "checks"),  # CEL takes null for left out
    Wrong({"dataset.promptColumn": "p", "dataset.messagesColumn": "m"}, "spec.dataset.messagesColumn"),
    Wrong({"algorithm.samplesPerPrompt": 1}, "spec.algorithm.samplesPerPrompt"),
    Wrong({"algorithm": {"name": "dapo", "samplesPerPrompt": 1}}, "spec.algorithm.samplesPerPrompt"),
    Wrong({"algorithm.clipHigh": 0}, "spec.algorithm.clipHigh"),
    Wrong({"algorithm.clipLow": 0.0}, "spec.algorithm.clipLow"),
    Wrong(PPO | {"algorithm.valueClip": 0}, "spec.algorithm.valueClip"),
    Wrong(PPO | {"algorithm.dynamicSampling": True}, "spec.algorithm.dynamicSampling"),
    Wrong({"algorithm.overlongBuffer": 256}, "spec.algorithm.overlongBuffer"),
    Wrong({"algorithm.overlongBuffer": 8, "generation.maxTokens": 8}, "spec.algorithm.overlongBuffer"),
    Wrong({"algorithm.gaeLambda": 0.5}, "spec.algorithm.gaeLambda"),
    Wrong({"algorithm.valueClip": 0.5}, "spec.algorithm.valueClip"),
    Wrong({"algorithm.valueCoefficient": 0.1}, "spec.algorithm.valueCoefficient"),
    Wrong({"model.critic": "owner/critic"}, "spec.model.critic"),
    Wrong({"training.criticOptimizer": {"learningRate": 1e-4}}, "spec.training.criticOptimizer"),
    Wrong(
        {"training.criticOptimizer": {"learningRate": 1e-5, "arguments": {"betas": [0.9, 0.9]}}},
        "spec.training.criticOptimizer",
        "checks",
    ),
    Wrong({"generation.speculation": {"mode": "model"}, "model.drafter": None}, "spec.generation.speculation.mode"),
    *(
        Wrong(drafting | elsewhere, "spec.model.drafter")
        for drafting in (
            {"model.drafter": "self"},
            {"model.drafter": "mtp"},
            {"generation.speculation": {"mode": "model"}},
        )
        for elsewhere in ({"generation.engine": {"name": "vllm"}}, {"roles.generator": {"tensorParallel": 2}})
    ),
    *(
        Wrong(
            {"generation.speculation": {"learning": "auto"}, "model.drafter": drafter},
            "spec.generation.speculation.learning",
        )
        for drafter in ("auto", "self", "mtp", None)
    ),
    Wrong({"generation.kvCacheTokens": 100}, "spec.generation.kvCacheTokens"),
    Wrong({"generation.stop": ["\n", ""]}, "spec.generation.stop[1]"),
    Wrong({"rewards.sources": [FUNCTION] * 33}, "spec.rewards.sources"),
    Wrong({"rewards.sources": [FUNCTION] * 2}, "spec.rewards.sources"),
    Wrong({"rewards.sources": [FUNCTION | {"name": "a"}, HTTP | {"name": "a"}]}, "spec.rewards.sources"),
    Wrong({"rewards.sources": [FUNCTION | {"name": "http://localhost:1/"}, HTTP]}, "spec.rewards.sources", "checks"),
    Wrong({f"{SOURCE}.type": "functon"}, f"spec.{SOURCE}"),
    Wrong({f"{SOURCE}.type": REMOVED}, f"spec.{SOURCE}"),
    Wrong({f"{SOURCE}.function": REMOVED}, f"spec.{SOURCE}.function"),
    Wrong({f"{SOURCE}.function": "rewards.exact"}, f"spec.{SOURCE}.function"),
    Wrong({f"{SOURCE}.url": "http://localhost:1/"}, f"spec.{SOURCE}.url"),
    Wrong({f"{SOURCE}.wieght": 2.0}, f"spec.{SOURCE}.wieght"),
    Wrong({f"{SOURCE}.retries": -1}, f"spec.{SOURCE}.retries"),
    Wrong({f"{SOURCE}.timeoutSeconds": 300}, "spec.rewards.sources"),
    Wrong({"roles.reward.deadlineSeconds": 100}, "spec.rewards.sources"),
    Wrong({f"{SOURCE}.batched": True, "roles.reward.workers": 2}, "spec.rewards.sources"),
    Wrong({f"{SOURCE}.weight": 0}, "spec.rewards.sources"),
    Wrong({"rewards": {"combine": "product", "sources": [FUNCTION, HTTP | {"weight": 0}]}}, "spec.rewards.sources"),
    Wrong({"rewards.sources": [HTTP | {"url": "ftp://x"}]}, f"spec.{SOURCE}.url"),
    Wrong({"rewards.sources": [HTTP | {"headers": {"key": 3}}]}, f"spec.{SOURCE}.headers.key"),
    Wrong({"training.miniBatches": 129}, "spec.training.miniBatches"),
    Wrong(PPO | {"training.miniBatches": 17}, "spec.training.miniBatches"),
    Wrong({"training.optimizer.name": "Adam W"}, "spec.training.optimizer.name"),
    Wrong(PPO | {"training.criticOptimizer": {"name": "a:b:c"}}, "spec.training.criticOptimizer.name"),
    Wrong({"training.schedule.name": ""}, "spec.training.schedule.name"),
    Wrong({"training.exactOnPolicy": True, "training.autocast": "bfloat16"}, "spec.training.autocast"),
    Wrong({"training.exactOnPolicy": True, "model.lora": {"dropout": 0.1}}, "spec.model.lora.dropout"),
    Wrong(
        {"training.exactOnPolicy": True, "training.activationCheckpointing": "on"},
        "spec.training.activationCheckpointing",
    ),
    Wrong({"training.exactOnPolicy": True, "model.dtype": "bfloat16"}, "spec.model.dtype"),
    Wrong({"training.exactOnPolicy": True, "generation.engine": {"name": "vllm"}}, "spec.generation.engine.name"),
    Wrong(
        {"serving.targetTpotMilliseconds": 50, "generation.engine": {"name": "vllm"}},
        "spec.serving.targetTpotMilliseconds",
    ),
    *(
        Wrong(
            {"generation.engine": {"name": name, "arguments": {argument: 1}}},
            f"spec.generation.engine.arguments.{argument}",
            "checks",
        )
        for name, argument in (("own", "quantization"), ("vllm", "logits_processors"), ("vllm", "max_model_len"))
    ),
    Wrong({"training.exactOnPolicy": True, "roles.trainer.nodes": 2}, "spec.roles.trainer.nodes"),
    Wrong({"training.exactOnPolicy": True, "roles.trainer.ranksPerNode": 2}, "spec.roles.trainer.ranksPerNode"),
    Wrong({"roles.trainer": {"ranksPerNode": 3, "tensorParallel": 2}}, "spec.roles.trainer.tensorParallel"),
    Wrong(
        {"roles.trainer": {"ranksPerNode": 2, "tensorParallel": 2}, "model.lora": {}},
        "spec.roles.trainer.tensorParallel",
    ),
    Wrong({"model.lora": {"targetModules": []}}, "spec.model.lora.targetModules", "checks"),
    Wrong({"model.lora": {"targetModules": 3}}, "spec.model.lora.targetModules", "checks"),
    Wrong({"roles.scorer": {}}, "spec.roles.scorer"),
    Wrong({"roles.prepare.workers": 2}, "spec.roles.prepare.workers"),
    Wrong({"roles.generator.replicas": {"min": 1}}, "spec.roles.generator.replicas.max"),
    Wrong({"roles.generator.replicas": {"min": 3, "max": 2}}, "spec.roles.generator.replicas.max"),
    Wrong({"roles.generator.replicas": {"min": 2, "max": 4}}, "spec.roles.generator.workers"),
    Wrong({"roles.generator": {"workers": 5, "replicas": {"max": 4}}}, "spec.roles.generator.workers"),
    Wrong({"roles.generator.replicas": {"max": 4}, "rebalance.mode": "off"}, "spec.rebalance.mode"),
    Wrong({"roles.generator": {"prefillWorkers": 1}}, "spec.roles.generator.prefillWorkers"),
    Wrong({"roles.generator": {"workers": 2, "prefillWorkers": 2}}, "spec.roles.generator.prefillWorkers"),
    Wrong(
        {"roles.generator": {"workers": 2, "prefillWorkers": 1}, "generation.engine.name": "vllm"},
        "spec.roles.generator.prefillWorkers",
    ),
    Wrong(
        {"roles.generator": {"workers": 2, "prefillWorkers": 1, "replicas": {"max": 4}}},
        "spec.roles.generator.prefillWorkers",
    ),
    Wrong({"roles.generator.tensorParallel": 2, "training.exactOnPolicy": True}, "spec.roles.generator.tensorParallel"),
    Wrong({"roles.reward.replicas": {"max": 4}}, "spec.roles.reward.replicas"),
    Wrong({"roles.gateway.workers": 2}, "spec.roles.gateway.workers"),
    Wrong({"roles.gateway.workers": 1, "generation.engine": {"name": "vllm"}}, "spec.roles.gateway.workers"),
    Wrong({"roles.reward.resources": {"limit": {"cpu": 1}}}, "spec.roles.reward.resources.limit"),
    Wrong({"roles.reward.resources": {"limits": {"cpu": "much"}}}, "spec.roles.reward.resources.limits"),
    Wrong({"roles.reward.resources": {"limits": {"cpu": -1}}}, "spec.roles.reward.resources.limits"),
    Wrong({"roles.reward.resources": {"limits": {"cpu": []}}}, "spec.roles.reward.resources.limits"),
    Wrong(pod_template("reward", spce={}), "spec.roles.reward.podTemplate.spce"),
    Wrong(pod_template("reward", metadata={"name": "x"}), "spec.roles.reward.podTemplate.metadata.name"),
    Wrong(pod_template("reward", metadata={"labels": {"a": 1}}), "spec.roles.reward.podTemplate.metadata.labels"),
    Wrong(
        pod_template("reward", metadata={"labels": {"rlhfspec.io/role": "trainer"}}),
        "spec.roles.reward.podTemplate.metadata.labels",
    ),
    Wrong(pod_template("reward", spec=[]), "spec.roles.reward.podTemplate.spec"),
    Wrong(pod_template("reward", spec={"containers": [{}]}), "spec.roles.reward.podTemplate.spec.containers"),
    Wrong(pod_template("reward", spec={"volumes": {"a": {}}}), "spec.roles.reward.podTemplate.spec.volumes"),
    Wrong(
        pod_template("trainer", spec={"restartPolicy": "Always"}), "spec.roles.trainer.podTemplate.spec.restartPolicy"
    ),
    Wrong({"podTemplate": {"metadata": {"labels": {"rlhfspec.io/role": "x"}}}}, "spec.podTemplate.metadata.labels"),
    Wrong({"podTemplate": {"spec": {"restartPolicy": "Always"}}}, "spec.podTemplate.spec.restartPolicy"),
    Wrong({"podTemplate": {"spec": {"containers": [{}]}}}, "spec.podTemplate.spec.containers"),
    Wrong({"podTemplate.metdata": {}}, "spec.podTemplate.metdata"),
    Wrong({"training.stopOnCollapse": True}, "spec.training.stopOnCollapse"),
    Wrong({"scheduling.queue": "q"}, "spec.scheduling.queue"),
    Wrong({"scheduling": {"queue": "q", "gang": "coscheduling"}}, "spec.scheduling.queue"),
    Wrong({"restart.roles": ["reward"]}, "spec.restart.id"),
    Wrong({"restart": {"id": "1", "roles": ["scorer"]}}, "spec.restart.roles[0]"),
    Wrong({"storage.runFolder": "/runs"}, "spec.storage.runFolder"),
    Wrong({"storage.uri": "data/jobs"}, "spec.storage.uri"),
    Wrong({"storage": {"uri": "s3://bucket/jobs", "claim": "data"}}, "spec.storage.uri"),
    Wrong({"storage": {"claim": "data", "secret": "keys"}}, "spec.storage.secret"),
    Wrong({"storage.runFolder": "a/../../b"}, "spec.storage.runFolder"),
    Wrong({"failurePolicy.rules": [{"action": "Ignore"}]}, "spec.failurePolicy.rules[0].exitCodes"),
    Wrong({"failurePolicy.rules": [{"exitCodes": [], "action": "Ignore"}]}, "spec.failurePolicy.rules[0].exitCodes"),
    Wrong({"failurePolicy.rules": [{"exitCodes": [0], "action": "Ignore"}]}, "spec.failurePolicy.rules[0].exitCodes"),
    Wrong({"failurePolicy.rules": [{"exitCodes": [256], "action": "Ignore"}]}, "spec.failurePolicy.rules[0].exitCodes"),
    Wrong({"failurePolicy.rules": [{"exitCodes": [1], "action": "Retry"}]}, "spec.failurePolicy.rules[0].action"),
    Wrong({"failurePolicy.rules": [{"exitCodes": [1], "action": "Ignore"}] * 33}, "spec.failurePolicy.rules"),
    Wrong(
        {"failurePolicy.rules": [{"exitCodes": [1], "action": "Ignore"}] * 2}, "spec.failurePolicy.rules[1]", "checks"
    ),
]


def all_wrong() -> list[Wrong]:
    return [*BY_HAND, *by_the_schema()]

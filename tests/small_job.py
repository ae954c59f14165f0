"""The small job of stage tests, which imports no torch."""

from typing import Any

from rlhfspec.job import RLHFJob

JOB = "sums"


def a_job(**spec: Any) -> RLHFJob:
    blocks: dict[str, dict[str, Any]] = {
        "model": {"path": "m"},
        "dataset": {"path": "data.jsonl", "shuffle": False},
        "algorithm": {"name": "grpo", "samplesPerPrompt": 2, "klCoefficient": 0.0},
        "generation": {"maxTokens": 4},
        "rewards": {"sources": [{"type": "function", "function": "rewards:exact"}]},
        "training": {"steps": 3, "promptsPerStep": 2},
    }
    for name, block in spec.items():
        blocks[name] = blocks.get(name, {}) | block
    content = {"apiVersion": "rlhfspec.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": JOB}, "spec": blocks}
    return RLHFJob.model_validate(content)

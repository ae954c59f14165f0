"""Template of a job: every field with its description, rarely changed ones commented out."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rlhfspec.job import API_VERSION, HeldOut, Lora, Spec, Wandb
from rlhfspec.job.block import Block
from rlhfspec.job.choices.algorithms import ALGORITHMS

DEFAULT_MODEL, DEFAULT_DATA = "tiny:sums", "tiny:sums.jsonl"  # made on this machine, so that the job runs unchanged
REWARD_MODULE = '''\
"""Rewards of the job beside this file. A function gets the arguments it names: prompt, completion, data columns."""


def exact(completion: str, answer: str) -> float:
    """1 for a completion that ends with the row's answer, else 0."""
    return float(completion.strip().endswith(str(answer)))
'''
_SOURCES_EXAMPLE = """    # Sources of rewards: function (module:function, also beside this file), model (path) or http.
    sources:
      - type: function
        function: rewards:exact
        # Weight of this reward in the combination.
        weight: 1.0"""
_UNQUOTED = re.compile(r"^[A-Za-z./~][\w./~+-]*(:[\w./+-]+)?$")
_ACTIVE = {
    "model.path", "dataset.path", "dataset.promptColumn", "algorithm.name", "algorithm.samplesPerPrompt",
    "generation.maxTokens", "generation.temperature", "generation.speculation.mode", "training.steps",
    "training.seed", "training.promptsPerStep", "training.optimizer.learningRate", "checkpoint.everySteps",
    "rewards.sources",
}  # fmt: skip
_WHEN_SET: dict[str, type[Block]] = {"evaluation": HeldOut, "model.lora": Lora, "observability.wandb": Wandb}
_EXAMPLES = {"observability.wandb.project": "my-project"}  # required fields in optional blocks
_HEAD = f"""# A job for rlhfspec. Check it with `rlhfspec validate`, start it with `rlhfspec run`.
# `#field: value` shows the default; remove the # to change it. Relative paths start at this file's folder.
apiVersion: {API_VERSION}
kind: RLHFJob
metadata:
  # Lower case letters, digits and dashes.
  name: {{name}}
spec:"""


def job_text(name: str, *, model: str, data: str, algorithm: str) -> str:
    values: dict[str, Any] = {"model.path": model, "dataset.path": data, "algorithm.name": algorithm}
    for field, value in ALGORITHMS[algorithm].defaults.items():
        values[f"algorithm.{to_camel(field)}"] = value
    lines = [_HEAD.format(name=name)]
    writer = _Writer(values)
    for field, info in Spec.model_fields.items():
        lines += writer.described(field, info, "", 2)
    return "\n".join(lines) + "\n"


class _Writer:
    """Writer of the template's blocks, which describes a field only where it first appears."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._described: set[tuple[str, str]] = set()

    def described(self, name: str, field: FieldInfo, prefix: str, indent: int, default: Any = None) -> Iterator[str]:
        words = field.description or ""
        if (name, words) not in self._described and f"{prefix}{name}" != "rewards.sources":
            self._described.add((name, words))
            yield from (f"{' ' * indent}# {line}" for line in textwrap.wrap(words, width=112 - indent))
        yield from self.field(name, field, prefix, indent, default)

    def field(self, name: str, field: FieldInfo, prefix: str, indent: int, default: Any = None) -> Iterator[str]:
        """Yield the lines of a field or its block. `default`: the enclosing block's default, which takes precedence."""
        path = f"{prefix}{to_camel(name)}"
        if path == "rewards.sources":
            yield _SOURCES_EXAMPLE
            return
        block = _WHEN_SET.get(path) or field.annotation
        if isinstance(block, type) and issubclass(block, Block):
            yield from self._block(path, block, indent, field.default)
            return
        value = getattr(default, name, field.default)
        value = _EXAMPLES.get(path) if value is PydanticUndefined else value
        yield f"{' ' * indent}{'' if path in _ACTIVE else '#'}{to_camel(name)}: {_yaml(self._values.get(path, value))}"

    def _block(self, path: str, block: type[Block], indent: int, default: Any) -> Iterator[str]:
        active = any(known.startswith(f"{path}.") for known in _ACTIVE)
        yield f"{' ' * indent}{'' if active else '#'}{path.rpartition('.')[2]}:"
        for name, field in block.model_fields.items():
            yield from self.described(name, field, f"{path}.", indent + 2, default)


def _yaml(value: Any) -> str:
    """Return the value as YAML: a plain word if YAML 1.1 does not read it as a boolean, else JSON.

    >>> _yaml("./model"), _yaml("off"), _yaml(1e-6), _yaml("a: b")
    ('./model', '"off"', '1.0e-06', '"a: b"')
    """
    if isinstance(value, str) and _UNQUOTED.match(value) and value not in ("off", "on", "yes", "no", "true", "false"):
        return value
    text = json.dumps(value)
    return text.replace("e-", ".0e-") if isinstance(value, float) and "." not in text else text

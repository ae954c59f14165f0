"""Engines for `generation.engine.name` (docs/generation.md#engine-vllm).

`make` takes the job and a tokenizer loader, and returns an `rlhfspec.engine.base.EngineProtocol`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhfspec.job.choices.registry import Entry, Registry, imported


@dataclass(frozen=True, kw_only=True)
class EngineEntry(Entry):
    """Engine and its abilities.

    `takes_a_group`: `make` accepts the processes of tensor parallelism; `divides_models`: it starts them itself.
    `is_exact`: log-probs equal the trainer's bit for bit. `argument_problem`, `missing`: module:name of a function that
    returns a problem or None.
    """

    is_movable: bool = False
    takes_a_group: bool = False
    divides_models: bool = False
    is_exact: bool = False
    argument_problem: str = ""
    missing: str = ""

    def problems(self, arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield (argument, problem) for each argument that the engine refuses."""
        none = f"the engine {self.name} takes no arguments: remove it"
        for name in arguments:
            if problem := imported(self.argument_problem)(name, arguments) if self.argument_problem else none:
                yield name, problem

    def what_is_missing(self, arguments: Mapping[str, Any]) -> str | None:
        return imported(self.missing)(arguments) if self.missing else None


ENGINES = Registry(
    "generation.engine.name",
    EngineEntry(
        name="own",
        about="this project's engine: lossless tree speculation on Hugging Face models",
        make="rlhfspec.engine.from_job:make",
        is_movable=True,
        takes_a_group=True,
        is_exact=True,
    ),
    EngineEntry(
        name="vllm",
        about="vLLM with this project's sampling, in its own process: for its devices, quantisation and parallelism",
        make="rlhfspec.engine.vllm.from_job:make",
        is_movable=True,
        divides_models=True,
        argument_problem="rlhfspec.job.choices.vllm_arguments:problem_of",
        missing="rlhfspec.engine.vllm.finding:what_is_missing",
    ),
)

"""What generates (docs/engine.md): `generation.engine` names one.

`make` is a function of the job and of what loads its tokenizer: it gives an `rlhfspec.engine.base.EngineProtocol`.

Example:
    >>> ENGINES["own"].is_movable
    True
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhfspec.job.choices.registry import Entry, Registry


@dataclass(frozen=True, kw_only=True)
class EngineEntry(Entry):
    """`is_movable`: what it makes is an `rlhfspec.engine.base.Movable`; else samples stay where they began.
    `takes_a_group`: `make` may be given the processes that hold the model together."""

    is_movable: bool = False
    takes_a_group: bool = False


ENGINES = Registry(
    "generation.engine",
    EngineEntry(
        name="own",
        about="this project's engine: lossless tree speculation by the law, on Hugging Face models",
        make="rlhfspec.engine.from_job:make",
        is_movable=True,
        takes_a_group=True,
    ),
)

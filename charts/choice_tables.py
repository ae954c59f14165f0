"""The tables in docs of what a job can choose by name, from `rlhfspec.job.choices`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from rlhfspec.job import Algorithm
from rlhfspec.job.choices.algorithms import ALGORITHMS, AlgorithmEntry
from rlhfspec.job.choices.drafters import DRAFTERS
from rlhfspec.job.choices.engines import ENGINES
from rlhfspec.job.choices.links import LINKS
from rlhfspec.job.choices.registry import Entry, Registry
from rlhfspec.job.choices.weight_stores import WEIGHT_STORES
from rlhfspec.messages.loop import scoring_stages

E = TypeVar("E", bound=Entry)
DOCS = Path(__file__).parent.parent / "docs"
_AVERAGED = {
    "token-mean": "over tokens",
    "sequence-mean-token-mean": "over tokens, then samples",
    "sequence-sum-constant": "sum over tokens / maxTokens",
}


def algorithms_table() -> str:
    return docs_table(
        {
            "name": lambda entry: f"[{entry.name}](#{_anchor(entry.name)})",
            "advantage": lambda entry: entry.about,
            "needs": lambda entry: ", ".join(scoring_stages(_of(entry))[1:]) or "-",
            "loss is averaged": lambda entry: _AVERAGED[_of(entry).loss_aggregation],
            "KL": _kl,
            "paper": lambda entry: f"[{entry.paper}](https://arxiv.org/abs/{entry.paper})",
        },
        ALGORITHMS,
    )


def drafters_table() -> str:
    return docs_table(
        {
            "`speculation.mode`": lambda entry: f"`{entry.name}`",
            "drafts from": lambda entry: entry.about,
            "needs": lambda entry: ", ".join(f"`{need}`" for need in entry.needs) or "-",
        },
        DRAFTERS,
    )


def engines_table() -> str:
    return docs_table(
        {
            "`generation.engine`": lambda entry: f"`{entry.name}`",
            "what it is": lambda entry: entry.about,
            "samples move": lambda entry: "yes" if entry.is_movable else "no",
        },
        ENGINES,
    )


def links_table() -> str:
    return docs_table(
        {
            "kind": lambda entry: f"`{entry.name}`",
            "between": lambda entry: entry.between,
            "what it is": lambda entry: entry.about,
        },
        LINKS,
    )


def weight_stores_table() -> str:
    return docs_table(
        {
            "store": lambda entry: f"`{entry.name}`",
            "for": lambda entry: entry.between,
            "carries a version by": lambda entry: entry.about,
        },
        WEIGHT_STORES,
    )


def _anchor(heading: str) -> str:
    """Return the anchor of a heading.

    >>> _anchor("reinforce++"), _anchor("dr-grpo")
    ('reinforce', 'dr-grpo')
    """
    return re.sub(r"[^a-z0-9-]", "", heading.lower())


def _of(entry: AlgorithmEntry) -> Algorithm:
    return Algorithm.model_validate({"name": entry.name})


def _kl(entry: AlgorithmEntry) -> str:
    algorithm = _of(entry)
    if algorithm.kl_coefficient == 0:
        return "none"
    return f"{algorithm.kl_coefficient:g}, {algorithm.kl_estimator}, in the {algorithm.kl_placement}"


def tables() -> dict[Path, dict[str, str]]:
    """Of each document, its tables by the name of their marks (`<!-- name -->`)."""
    return {
        DOCS / "algorithms.md": {"algorithms": algorithms_table()},
        DOCS / "generation.md": {"drafters": drafters_table(), "engines": engines_table()},
        DOCS / "moving.md": {"links": links_table()},
        DOCS / "training.md": {"weight stores": weight_stores_table()},
    }


def docs_table(columns: Mapping[str, Callable[[E], str]], registry: Registry[E]) -> str:
    """A table of Markdown, one row an entry.

    >>> print(docs_table({"name": lambda entry: entry.name}, Registry("f", Entry(name="a", about="", make=""))))
    | name |
    |---|
    | a |
    """
    rows = [list(columns), *([cell(entry) for cell in columns.values()] for entry in registry.values())]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]])

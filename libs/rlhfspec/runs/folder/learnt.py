"""Costs and gains of drafter learning, one file per generator; no token depends on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rlhfspec.telemetry.folder import append_lines

LEARNT = "drafter"  # folder; rlhfspec.training.checkpoint.learnt keeps the weights there


@dataclass(frozen=True, slots=True, kw_only=True)
class LearntLine:
    generator: str
    unix_seconds: float
    weights_version: int
    version: int  # of the drafter, at the end of the period
    num_tokens: int  # learnt from in this period
    seconds: float  # of learning, in this period
    saved_seconds: float  # by learning, in this period
    law: tuple[float, ...]  # on text not yet learnt from, by depth
    acceptance: tuple[float, ...]  # of drafts, by depth
    level_share: float | None = None  # cost of a level, over that of a verification
    tokens_per_verification: float | None = None  # with drafts, in this period


def append_learnt_line(run_folder: Path, line: LearntLine) -> None:
    append_lines(run_folder / LEARNT / f"{line.generator}.jsonl", [json.dumps(asdict(line)) + "\n"])


def learnt_lines(run_folder: Path) -> Iterator[LearntLine]:
    """Yield the learning records of all generators by time, skipping damaged lines. Older ones have other fields."""
    names = [field.name for field in fields(LearntLine)]
    found: list[LearntLine] = []
    for path in sorted((run_folder / LEARNT).glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                content: dict[str, Any] = json.loads(text)
                given = {name: content[name] for name in names if name in content}
                tuples = {name: tuple(given.get(name, ())) for name in ("law", "acceptance")}
                found.append(LearntLine(**given | tuples))
            except (ValueError, TypeError):
                continue
    yield from sorted(found, key=lambda line: line.unix_seconds)

"""What learning cost and brought each generator's drafter in a run: lines beside the newest weights, in `drafter`.

No token depends on what is there: where it is damaged a drafter begins anew, and nothing but speed is lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhfspec.telemetry.folder import append_lines

LEARNT = "drafter"  # the folder; of the weights there, rlhfspec.training.checkpoint.learnt knows


@dataclass(frozen=True, slots=True, kw_only=True)
class LearntLine:
    """Of one generator under one version of the policy's weights."""

    generator: str
    unix_seconds: float
    weights_version: int
    version: int  # of what was learnt, at its end
    num_tokens: int  # learnt from in this time, as all that follow
    seconds: float
    saved_seconds: float
    num_accepted: tuple[int, ...]  # verifications of its drafts in which 0, 1, 2, ... drafted tokens were accepted


def append_learnt_line(run_folder: Path, line: LearntLine) -> None:
    append_lines(run_folder / LEARNT / f"{line.generator}.jsonl", [json.dumps(asdict(line)) + "\n"])


def learnt_lines(run_folder: Path) -> Iterator[LearntLine]:
    """Of all generators, as they came; a line that a process was killed in is left out."""
    found: list[LearntLine] = []
    for path in sorted((run_folder / LEARNT).glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                content: dict[str, Any] = json.loads(text)
                found.append(LearntLine(**content | {"num_accepted": tuple(content["num_accepted"])}))
            except (ValueError, TypeError, KeyError):
                continue
    yield from sorted(found, key=lambda line: line.unix_seconds)

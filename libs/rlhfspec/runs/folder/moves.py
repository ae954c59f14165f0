"""`moves.jsonl`: the rebalancer's plans with reasons, and the outcome of each move.

A line is {"kind": "plan", ...} or {"kind": "moved", ...}. If the file cannot be written, the run continues.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rlhfspec.messages.records import Moved, Plan
from rlhfspec.telemetry.folder import append_lines

MOVES_FILE, COSTS_FILE = "moves.jsonl", "costs.json"
_ENDS = {"num_samples", "num_generators", "latest_end", "latest_end_after"}
_LINE_KEYS = {
    "plan": {"at", "id", "moves", "why_not", "dry", *_ENDS},
    "moved": {"at", *(field.name for field in fields(Moved))} - {"code"},  # older files have none
}
log = logging.getLogger("rlhfspec.telemetry")


class MovesFile:
    def __init__(self, run: Path, *, now: Callable[[], float] = time.time) -> None:
        self._path = run / MOVES_FILE
        self._now = now
        self._is_broken = False

    def plan(self, plan: Plan) -> None:
        self._append([{"kind": "plan", "at": round(self._now(), 3), "id": plan.id, **content_of(plan)}])

    def moved(self, records: Iterable[Moved]) -> None:
        at = round(self._now(), 3)
        self._append([{"kind": "moved", "at": at, **asdict(record)} for record in records])

    def costs(self, content: Mapping[str, Any]) -> None:
        """Write `costs.json`: what steps, prefill and moves cost here, and the lengths of the latest step."""
        path = self._path.with_name(COSTS_FILE)
        try:
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(content) + "\n")
            temporary.replace(path)
        except OSError as error:
            log.warning("costs are not written: %s: %s", path, error.strerror)

    def _append(self, lines: list[dict[str, Any]]) -> None:
        if self._is_broken:
            return
        try:
            append_lines(self._path, [json.dumps(line) + "\n" for line in lines])
        except OSError as error:
            log.warning("moves are no longer written: %s: %s", self._path, error.strerror)
            self._is_broken = True


def content_of(plan: Plan) -> dict[str, Any]:
    """Return the plan's fields for its line in moves.jsonl."""
    told = ("ends", "num_generators", "num_samples", "latest_end", "latest_end_after", "moves", "why_not", "dry")
    content = asdict(plan)
    return {name: content[name] for name in told}


def read_moves(run: Path, *, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield (line, offset of the next line) from `offset` on, skipping damaged lines."""
    path = run / MOVES_FILE
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                content = json.loads(line)
            except ValueError:
                continue
            if isinstance(content, dict) and content.keys() >= _LINE_KEYS.get(str(content.get("kind")), {""}):
                yield content, offset

"""What a job reads from its base folder, by the names it says: to be fetched from an object store before it is read.

Example:
    >>> spec = {"model": {"path": "models/small"}, "dataset": {"path": "./data/sums.jsonl"},
    ...         "rewards": {"sources": [{"type": "function", "function": "rewards.sums:exact"}]}}
    >>> input_paths(spec, Path("/storage"))
    ['models/small', 'data/sums.jsonl', 'rewards.py', 'rewards']
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhfspec.job.file.files import MODEL_FIELDS
from rlhfspec.job.file.paths import MADE_HERE, MADE_OF_THE_POLICY


def input_paths(spec: Mapping[str, Any], base: Path) -> list[str]:
    """spec: as it was written, right or wrong, or resolved. Files and folders below the base, there or not."""
    found = (_below(text, base) for text in _named(spec) if isinstance(text, str))
    return list(dict.fromkeys(path for path in found if path))


def _named(spec: Mapping[str, Any]) -> Iterator[Any]:
    model = _block(spec, "model")
    yield from (model.get(name) for name in MODEL_FIELDS if (name, model.get(name)) != MADE_OF_THE_POLICY)
    yield _block(spec, "dataset").get("path")
    yield _block(spec, "evaluation").get("path")
    sources = _block(spec, "rewards").get("sources")
    for source in sources if isinstance(sources, list) else ():
        if isinstance(source, dict):
            yield source.get("path")
            top = str(source.get("function") or "").partition(":")[0].partition(".")[0]
            yield from (f"{top}.py", top) if top else ()


def _block(spec: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    block = spec.get(name)
    return block if isinstance(block, dict) else {}


def _below(text: str, base: Path) -> str | None:
    """
    >>> [_below(text, Path("/storage")) for text in ("/storage/m", "./d.csv", "tiny:sums", "/etc", "../m", "s3://b/m")]
    ['m', 'd.csv', None, None, None, None]
    """
    if text.startswith((MADE_HERE, "~")) or "://" in text:
        return None
    path = posixpath.normpath(posixpath.join(str(base), text))
    return posixpath.relpath(path, str(base)) if path.startswith(f"{base}/") else None

"""Comparison of a run's job with the job of its resumption."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml
from pydantic import ValidationError

from rlhfspec.job import RLHFJob
from rlhfspec.job.block import Mark, marked
from rlhfspec.job.file.secrets import shown_value
from rlhfspec.job.file.yaml_text import parts_of

RECORDED = tuple(marked(RLHFJob, Mark.RECORDED))
MAY_DIFFER = RECORDED + tuple(
    path for mark in (Mark.RESUMABLE, Mark.MUTABLE, Mark.MUTABLE_WHILE_SUSPENDED) for path in marked(RLHFJob, mark)
)
_PLACE_IN_A_LIST = re.compile(r"\[\d+\]")


def as_content(job: RLHFJob) -> dict[str, Any]:
    content: dict[str, Any] = job.model_dump(by_alias=True, mode="json")
    return content


def with_new_fields(before: dict[str, Any]) -> dict[str, Any]:
    """Return an earlier release's job with new fields at their defaults, or unchanged if invalid."""
    try:
        return as_content(RLHFJob.model_validate(before))
    except ValidationError:
        return before


def as_yaml(job: RLHFJob) -> str:
    return yaml.dump(as_content(job), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes strings such as 1e3, which the YAML 1.2 of job files reads as numbers."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        node = self.represent_str(text)
        try:
            float(text)
        except ValueError:
            return node
        return yaml.ScalarNode(node.tag, node.value, style="'")


_Dumper.add_representer(str, _Dumper.represent_text)


def first_difference(before: dict[str, Any], now: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """Return (field, old, new) of the first change that forbids a resumption, or None."""
    for path, old, new in _differences(before, now, ""):
        if not _is_one_of(path, MAY_DIFFER):
            at = parts_of(path)
            return path, shown_value(at, old), shown_value(at, new)
    return None


def recorded_changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return (old, new) of the changed fields that a resumption records, by path."""
    changes = _differences(before, now, "")
    return {path: (old, new) for path, old, new in changes if _is_one_of(path, RECORDED)}


def _is_one_of(path: str, fields: Iterable[str]) -> bool:
    field = _PLACE_IN_A_LIST.sub("", path)
    return any(field == each or field.startswith(each + ".") for each in fields)


def _differences(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from _differences(left, right, f"{path}[{place}]")
    elif old != new:
        yield path, old, new

"""One thing found wrong with a job: a field, and the fix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhfspec.errors import Problem
from rlhfspec.job.file.problems import place_of
from rlhfspec.job.file.secrets import shown_value
from rlhfspec.job.file.yaml_text import Path_, parts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`depends_on`: the other fields it was concluded from; when one of those is wrong itself, this says nothing."""

    field: str
    problem: str
    value: object = None
    depends_on: tuple[str, ...] = ()

    def as_problem(self, places: Mapping[Path_, str]) -> Problem:
        path = parts_of(self.field)
        value = shown_value(path, self.value)
        return Problem(field=self.field, value=value, problem=self.problem, where=place_of(path, places))

    def rests_on(self, wrong: set[str]) -> bool:
        """Whether one of the fields it looks at is wrong."""
        return any(name in wrong for name in (self.field, *self.depends_on))

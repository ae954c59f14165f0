"""docs/job.md has every field of a job, with its description, its default and its bounds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

import annotated_types
import pytest
from places import ROOT
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rlhfspec.job import Metadata, Spec
from rlhfspec.job.block import MOST, MOST_SECONDS, MOST_WORKERS, Block, Mark, marked
from rlhfspec.job.choices.algorithms import ALGORITHMS

BY_ALGORITHM = {f"algorithm.{to_camel(name)}" for entry in ALGORITHMS.values() for name in entry.defaults}
SAID_ONCE = {MOST, MOST_SECONDS, MOST_WORKERS}


def blocks_in(annotation: Any) -> Iterator[type[Block]]:
    if isinstance(annotation, type) and issubclass(annotation, Block):
        yield annotation
    for inside in get_args(annotation):
        yield from blocks_in(inside)


def fields_of(block: type[Block], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Walks the classes, not the schema that the tables are made of."""
    for name, field in block.model_fields.items():
        at = f"{path}{to_camel(name)}"
        within = list(blocks_in(field.annotation))
        if not within or get_origin(field.annotation) is not None:
            yield at, field
        inner = f"{at}[]." if get_origin(field.annotation) is list else f"{at}."
        for each in within:
            yield from fields_of(each, inner)


FIELDS = [*fields_of(Metadata, "metadata."), *fields_of(Spec)]


def rows() -> dict[str, list[str]]:
    """Type, default and description, by path; what all roles have is at roles.ROLE."""
    found, block = {}, ""
    for line in (ROOT / "docs" / "job.md").read_text().splitlines():
        if line.startswith("### `"):
            block = line.strip("# `")
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if block and len(cells) == 4 and cells[0].startswith("`"):
            found[f"{block}.{cells[0].strip('`')}".removeprefix("spec.")] = cells[1:]
    return found


ROWS = rows()


def row_of(path: str) -> list[str]:
    return ROWS.get(path) or ROWS[re.sub(r"^roles\.\w+\.", "roles.ROLE.", path)]


def test_there_are_as_many_fields_as_a_job_has() -> None:
    assert len({path for path, _ in FIELDS}) > 150


@pytest.mark.parametrize(("path", "field"), FIELDS, ids=[path for path, _ in FIELDS])
def test_the_page_describes_the_field(path: str, field: FieldInfo) -> None:
    kind, default, description = row_of(path)
    assert field.description
    assert field.description in description
    if field.is_required():
        assert default == "required"
    elif field.default is not PydanticUndefined and path not in BY_ALGORITHM and not path.startswith("training.critic"):
        assert default == f"`{json.dumps(field.default)}`"
    for bound in bounds_of(field):
        assert re.search(rf"[<>]=? {re.escape(bound)}\b", kind), f"{bound} in {kind}"


def bounds_of(field: FieldInfo) -> Iterator[str]:
    """Also of the one type that a field has beside null."""
    for said in [*field.metadata, *(said for part in union_of(field.annotation) for said in metadata_of(part))]:
        for name in ("ge", "gt", "le", "lt"):
            bound = getattr(said, name, None) if isinstance(said, annotated_types.BaseMetadata) else None
            if bound is not None and bound not in SAID_ONCE:
                yield "2^63" if bound == 1 << 63 else f"{bound:g}"


def union_of(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, type(int | str)) else ()


def metadata_of(annotated: Any) -> Iterator[Any]:
    for said in getattr(annotated, "__metadata__", ()):
        yield from said.metadata if isinstance(said, FieldInfo) else (said,)


def test_what_a_role_has_otherwise_is_at_the_role() -> None:
    assert "Mutable" in ROWS["roles.generator.workers"][2]
    assert "Mutable" not in ROWS["roles.ROLE.workers"][2]


@pytest.mark.parametrize("mark", [Mark.CLUSTER_ONLY, Mark.MUTABLE, Mark.MUTABLE_WHILE_SUSPENDED])
def test_marks_of_fields_are_shown(mark: Mark) -> None:
    said = {Mark.CLUSTER_ONLY: "*In a cluster only.*", Mark.MUTABLE: "*Mutable.*"}.get(
        mark, "*Mutable while suspended.*"
    )
    blocks = [path for path in marked(Spec, mark) if any(each.startswith(f"{path}.") for each, _ in FIELDS)]
    for path in set(marked(Spec, mark)) - set(blocks):
        assert said in row_of(path.replace("failurePolicy.rules.", "failurePolicy.rules[]."))[2], path


def test_the_page_describes_no_other_field() -> None:
    paths = {path for path, _ in FIELDS}
    paths |= {re.sub(r"^roles\.\w+\.", "roles.ROLE.", path) for path in paths}
    assert set(ROWS) <= paths


@pytest.mark.parametrize(("path", "field"), FIELDS, ids=[path for path, _ in FIELDS])
def test_a_description_is_a_sentence(path: str, field: FieldInfo) -> None:
    """Not a rest of one that begins with "Of" or "That", and no sentence about a program as if it were a person."""
    description = field.description or ""
    assert description.endswith(".")
    assert not re.match(r"(Of|That|By|Also|null|It|Else) ", description), path
    assert not re.search(r"\b(who|whom|whoever|nobody|somebody)\b", description, re.IGNORECASE), path

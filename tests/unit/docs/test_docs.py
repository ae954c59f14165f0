import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from places import ROOT
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo
from typer.testing import CliRunner

from rlhfspec.cli.main import app
from rlhfspec.job import Metadata, Spec
from rlhfspec.job.block import Block


def blocks_in(annotation: Any) -> Iterator[type[Block]]:
    if isinstance(annotation, type) and issubclass(annotation, Block):
        yield annotation
    for inside in get_args(annotation):
        yield from blocks_in(inside)


def fields_of(block: type[Block], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield fields from the classes, not from the schema behind the tables."""
    for name, field in block.model_fields.items():
        at = f"{path}{to_camel(name)}"
        within = list(blocks_in(field.annotation))
        if not within or get_origin(field.annotation) is not None:
            yield at, field
        inner = f"{at}[]." if get_origin(field.annotation) is list else f"{at}."
        for each in within:
            yield from fields_of(each, inner)


def rows() -> Iterator[tuple[str, str]]:
    """Yield path and description; fields of all roles are at roles.ROLE."""
    block = ""
    for line in (ROOT / "docs" / "job.md").read_text().splitlines():
        if line.startswith("### `"):
            block = line.strip("# `")
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if block and len(cells) == 4 and cells[0].startswith("`"):
            yield f"{block}.{cells[0].strip('`')}".removeprefix("spec."), cells[3]


def test_the_page_describes_every_field_in_a_sentence() -> None:
    fields = [*fields_of(Metadata, "metadata."), *fields_of(Spec)]
    assert len(fields) > 150
    told = dict(rows())
    for path, field in fields:
        description = field.description or ""
        assert description in (told.get(path) or told[re.sub(r"^roles\.\w+\.", "roles.ROLE.", path)])
        assert re.match(r"(?!(Of|That|By|Also|null|It|Else) ).+\.$", description, re.DOTALL), path
        assert not re.search(r"\b(who|whom|whoever|nobody|somebody)\b", description, re.IGNORECASE), path


def test_the_readme_shows_what_validate_prints() -> None:
    """Lines on the data are excepted, as it may be absent."""
    readme = (ROOT / "README.md").read_text().splitlines()
    printed = CliRunner().invoke(app, ["validate", str(ROOT / "examples" / "grpo.yaml")]).output
    lines = [line for line in printed.splitlines()[1:] if line and not line.startswith("  data")]
    assert len(lines) >= 5
    assert set(lines) <= set(readme)


def test_the_index_leads_to_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert not {page for page in pages if f"({page})" not in index}

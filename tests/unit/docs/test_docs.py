import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import typer
from house import code_of
from places import ROOT
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo
from typer.testing import CliRunner

from rlhfspec.cli.beside import Beside
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


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands_of(page: Path) -> Iterator[tuple[int, list[str]]]:
    for number, code in code_of(page.read_text()):
        if found := re.match(r"(?:\$ )?(?:\S*bin/)?rlhfspec (.+)", code):
            words = shlex.split(found[1], comments=True)
            end = next((place for place, word in enumerate(words) if word in ("|", "&&", ">")), len(words))
            yield number, words[:end]


def parse(command: Any, words: list[str]) -> None:
    """Raise an error about a command, option or argument that does not exist."""
    if isinstance(command, Beside):
        command = command.imported()
    context = command.context_class(command)
    _, rest, _ = command.make_parser(context).parse_args(words)
    if rest and hasattr(command, "get_command"):
        inner = command.get_command(context, rest[0])
        assert inner is not None, f"no command {rest[0]}"
        parse(inner, rest[1:])
    else:
        assert not rest, f"more arguments than {command.name} takes: {rest}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_command_line_takes_every_command_of_a_page(page: Path) -> None:
    for number, words in commands_of(page):
        try:
            parse(typer.main.get_command(app), list(words))
        except Exception as error:
            pytest.fail(f"{page.name}:{number}: rlhfspec {shlex.join(words)}: {error!r}")


def test_commands_of_pages_are_found_and_wrong_ones_refused(tmp_path: Path) -> None:
    assert sum(1 for page in PAGES for _ in commands_of(page)) > 100
    md = tmp_path / "page.md"
    md.write_text("```bash\n$ rlhfspec run job.yaml \\\n  --out there   # it\n```\nor `rlhfspec run --nats job.yaml`\n")
    (_, right), (number, wrong) = commands_of(md)
    assert (right, number) == (["run", "job.yaml", "--out", "there"], 5)
    with pytest.raises(Exception, match="--nats"):
        parse(typer.main.get_command(app), wrong)

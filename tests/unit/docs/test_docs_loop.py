"""docs/loop.md says what the map says: stages, records, subjects, who publishes and who reads."""

from __future__ import annotations

from typing import get_args

import pytest
from places import ROOT

from rlhfspec.messages import loop
from rlhfspec.messages.records import Record

STAGES = {stage.name: stage for stage in loop.STAGES}


def table(text: str, name: str) -> dict[str, list[str]]:
    """Rows between the marks of a table, by their first cell."""
    between = text.split(f"<!-- {name} -->")[1].split(f"<!-- end of {name} -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in between.strip().splitlines()]
    return {row[0]: row[1:] for row in rows[2:]}


LOOP = (ROOT / "docs" / "loop.md").read_text()


def test_the_page_of_the_loop_has_every_stage() -> None:
    rows = table(LOOP, "stages")
    assert set(rows) == set(STAGES)
    for name, (consumes, produces, watches, waits_for, unblocked_by) in rows.items():
        stage = STAGES[name]
        for shown, records in ((consumes, stage.consumes), (produces, stage.produces), (watches, stage.watches)):
            assert set(shown.split(", ")) - {"-"} == {record.__name__ for record in records}
        assert waits_for == stage.waits_for
        assert set(unblocked_by.split(", ")) - {"-"} == set(stage.unblocked_by)


@pytest.mark.parametrize("record", get_args(Record), ids=lambda record: record.__name__)
def test_the_page_of_the_loop_says_who_publishes_and_reads(record: type[Record]) -> None:
    kind, subject, publishers, readers = table(LOOP, "records")[record.__name__]
    assert kind == loop.KINDS[record]
    assert subject.strip("`") == loop.subject("JOB", "UID", record)
    producing = {name for name, stage in STAGES.items() if record in stage.produces}
    assert set(publishers.split(", ")) == (producing or {"every process"})
    reading = {name for name, stage in STAGES.items() if record in stage.consumes}
    watching = {name for name, stage in STAGES.items() if record in stage.watches}
    watching |= {observer.name for observer in loop.OBSERVERS if record in observer.consumes}
    expected = {"every process"} if record in loop.SEEN_BY_ALL else reading | {f"*{name}*" for name in watching}
    assert set(readers.split(", ")) == expected
    assert (record in loop.OF_A_PROCESS) == (publishers == "every process")

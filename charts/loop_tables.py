"""The tables of docs/processes.md, from `rlhfspec.messages.loop`: stages, and records with subjects and readers."""

from __future__ import annotations

from rlhfspec.messages import loop
from rlhfspec.messages.records import Record

EVERY_PROCESS = "every process"


def stages_table() -> str:
    rows = [
        f"| {stage.name} | {_names(stage.consumes)} | {_names(stage.produces)} | {_names(stage.watches)} "
        f"| {stage.waits_for} | {', '.join(stage.unblocked_by) or '-'} |"
        for stage in loop.STAGES
    ]
    head = ("| stage | consumes | produces | watches | waits for | unblocked by |", "|---|---|---|---|---|---|")
    return "\n".join([*head, *rows])


def records_table() -> str:
    """In the order of the map.

    >>> "| Demand | work | `rlhf.JOB.UID.demand` | trainer | prompts |" in records_table()
    True
    """
    rows = [
        f"| {record.__name__} | {kind} | `{loop.subject('JOB', 'UID', record)}` "
        f"| {_publishers(record)} | {_readers(record)} |"
        for record, kind in loop.KINDS.items()
    ]
    return "\n".join(["| record | kind | subject | published by | read by |", "|---|---|---|---|---|", *rows])


def _publishers(record: type[Record]) -> str:
    return ", ".join(_stages_with("produces", record)) or EVERY_PROCESS


def _readers(record: type[Record]) -> str:
    """Stages that consume a record, then those and the observers that only watch it."""
    if record in loop.SEEN_BY_ALL:
        return EVERY_PROCESS
    watching = [*_stages_with("watches", record), *(each.name for each in loop.OBSERVERS if record in each.consumes)]
    return ", ".join([*_stages_with("consumes", record), *(f"*{name}*" for name in watching)])


def _stages_with(part: str, record: type[Record]) -> list[str]:
    return [stage.name for stage in loop.STAGES if record in getattr(stage, part)]


def _names(records: tuple[type[Record], ...]) -> str:
    return ", ".join(record.__name__ for record in records) or "-"

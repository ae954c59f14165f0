"""Commands of other distributions, looked up in the entry point group `rlhfspec.commands`."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from rlhfspec.cli.problems import refuse

_GROUP = "rlhfspec.commands"
BENCH = {
    "bench": "Benchmarks of generation, training steps, moves and serving.",
    "models": "Check which models run bit-exactly, and why others are refused.",
    "simulate": "Simulate the generation stage of a job: when each policy would finish it, compared with the optimum.",
}


class Beside(TyperCommand):
    """Lazily imported command of another distribution."""

    def imported(self) -> Any:
        assert self.name is not None
        found = _entry_point(self.name)
        if found is None:
            refuse(f"rlhfspec {self.name} is a command of rlhfspec-bench: pip install rlhfspec-bench")
        command = typer.main.get_command(found.load())
        command.name = self.name
        escape_help(command)
        return command


class WithCommandsBeside(TyperGroup):
    """Command group with the commands of other distributions, and help texts that are no markup."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        escape_help(self)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *BENCH]

    def get_command(self, ctx: Any, name: str) -> Any:
        if own := super().get_command(ctx, name):
            return own
        if name in BENCH:
            return Beside(name, help=BENCH[name])
        return Beside(name) if _entry_point(name) else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.imported() if isinstance(command, Beside) else command, rest


def escape_help(command: Any) -> None:
    """Keep rich from reading [default: ...] as markup, in a command and all below it."""
    if command.rich_markup_mode != "rich":
        return
    for each in (command, *command.params):
        if getattr(each, "help", None):
            each.help = escape(each.help)
    for below in getattr(command, "commands", {}).values():
        escape_help(below)


def _entry_point(name: str) -> EntryPoint | None:
    return next(iter(entry_points(group=_GROUP, name=name)), None)

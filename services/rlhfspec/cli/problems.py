"""How commands say what went wrong, without a traceback: what a user wrote (exit code 2), or what was found (1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from rlhfspec.cli.exit_codes import FAILED
from rlhfspec.errors import InvalidRequest, RLHFSpecError


@contextmanager
def exit_on_problems() -> Iterator[None]:
    """Around everything that reads what a user wrote, and what lies on the disk; `run` uses it too.

    >>> try:
    ...     with exit_on_problems():
    ...         raise InvalidRequest("steps", 0, "must be >= 1")
    ... except typer.Exit as ended:
    ...     ended.exit_code
    2
    """
    try:
        yield
    except InvalidRequest as error:
        refuse(str(error))
    except RLHFSpecError as error:  # damaged checkpoints, an export that finds no room
        refuse(str(error), code=FAILED)


def refuse(message: str, *, code: int = 2) -> NoReturn:
    typer.echo(message.encode(errors="backslashreplace"), err=True)
    raise typer.Exit(code)

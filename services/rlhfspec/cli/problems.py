"""How commands say what a user can mend: every problem on its own line, exit code 2, no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from rlhfspec.errors import InvalidRequest


@contextmanager
def exit_on_problems() -> Iterator[None]:
    """Around everything that reads what a user wrote; `run` uses it too.

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


def refuse(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(2)

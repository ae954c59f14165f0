"""How commands say what went wrong, without a traceback: what a user wrote (exit code 2), or what was found (1), on the
disk or in the limits of the machine."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from rlhfspec.cli.signals import FAILED
from rlhfspec.errors import InvalidRequest, RLHFSpecError

LIMITS = {
    errno.EAGAIN: "a limit on processes and threads: ulimit -u, or the container's",
    errno.EMFILE: "the limit on open files: ulimit -n",
    errno.ENOMEM: "memory ran out, or a limit on it: ulimit -v, or the container's",
}


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
    except OSError as error:
        if error.filename is None and error.errno not in LIMITS:  # says nothing of what failed
            raise
        refuse(said_of(error), code=FAILED)
    except MemoryError:
        refuse(LIMITS[errno.ENOMEM], code=FAILED)


def said_of(error: OSError) -> str:
    """
    >>> said_of(PermissionError(errno.EACCES, "Permission denied", "model.safetensors"))
    'model.safetensors: Permission denied'
    >>> said_of(BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"))
    "Resource temporarily unavailable (a limit on processes and threads: ulimit -u, or the container's)"
    """
    place = f"{error.filename}: " if error.filename is not None else ""
    limit = f" ({LIMITS[error.errno]})" if error.errno in LIMITS else ""
    return f"{place}{error.strerror or error}{limit}"


def refuse(message: str, *, code: int = 2) -> NoReturn:
    typer.echo(message.encode(errors="backslashreplace"), err=True)
    raise typer.Exit(code)

"""Error messages of commands. Exit codes: 2 for wrong input, 1 for the disk or machine."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from rlhfspec.cli.signals import FAILED
from rlhfspec.errors import InvalidRequest, RLHFSpecError

LIMITS = {
    errno.EAGAIN: "too many processes or threads: raise ulimit -u or the pids limit",
    errno.EMFILE: "limit on open files: raise ulimit -n",
    errno.ENOMEM: "out of memory: raise ulimit -v or the container's limit",
}


@contextmanager
def exit_on_problems() -> Iterator[None]:
    """Print an error of input, disk or memory, and exit with its code."""
    try:
        yield
    except InvalidRequest as error:
        refuse(str(error))
    except RLHFSpecError as error:  # damaged checkpoints, an export that finds no room
        refuse(str(error), code=FAILED)
    except OSError as error:
        if error.filename is None and error.errno not in LIMITS:  # does not name what failed
            raise
        refuse(said_of(error), code=FAILED)
    except MemoryError:
        refuse(LIMITS[errno.ENOMEM], code=FAILED)


def said_of(error: OSError) -> str:
    """Return the error's message with its file, and the system limit behind it.

    >>> said_of(BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"))
    'Resource temporarily unavailable (too many processes or threads: raise ulimit -u or the pids limit)'
    """
    place = f"{error.filename}: " if error.filename is not None else ""
    limit = f" ({LIMITS[error.errno]})" if error.errno in LIMITS else ""
    return f"{place}{error.strerror or error}{limit}"


def refuse(message: str, *, code: int = 2) -> NoReturn:
    typer.echo(message.encode(errors="backslashreplace"), err=True)
    raise typer.Exit(code)

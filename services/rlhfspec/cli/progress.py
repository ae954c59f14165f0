"""Status line: rewritten in place on a terminal, printed line by line elsewhere."""

from __future__ import annotations

from rich.console import Console


def wide_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=150)


class StatusLine:
    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._status = self._console.status("starting") if self._console.is_terminal else None

    def __call__(self, message: str) -> None:
        if self._status is None:
            self._console.print(message, markup=False, highlight=False, soft_wrap=True)
        else:
            self._status.update(message)

    def __enter__(self) -> StatusLine:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()

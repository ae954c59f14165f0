r"""Terminal output that shows control characters in texts of the cluster as symbols.

Example:
    >>> say("red \x1b[31m, or \u202e backwards")
    red ␛[31m, or � backwards
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rlhfspec.runs.view.text import visible


def shown(text: str) -> str:
    r"""Return text with control characters shown as symbols; line ends stay and tabs are expanded.

    >>> shown("a\tb\r\nc\x07")
    'a       b\nc␇'
    """
    return visible(text.replace("\r\n", "\n").expandtabs())


def say(text: str, *, is_error: bool = False) -> None:
    print(shown(text), file=sys.stderr if is_error else sys.stdout, flush=True)


class SafeConsole(Console):
    """Console that also sanitizes text in tables and trees."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else shown(text), style, control)


def console() -> SafeConsole:
    """Return a console for the terminal, or one of width 200 for other outputs."""
    found = SafeConsole()
    return found if found.is_terminal else SafeConsole(width=200)

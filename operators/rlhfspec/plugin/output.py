"""What is printed. Pods, events and conditions may say anything: whatever would move, colour, hide or reverse something
in a terminal is shown as a picture of itself, in every command.

Example:
    >>> say("red \\x1b[31m, or \\u202e backwards")
    red ␛[31m, or � backwards
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rlhfspec.runs.view.text import visible


def shown(text: str) -> str:
    """Line ends stay, and a tab is as wide as it would be.

    >>> shown("a\\tb\\r\\nc\\x07")
    'a       b\\nc␇'
    """
    return visible(text.replace("\r\n", "\n").expandtabs())


def say(text: str, *, is_error: bool = False) -> None:
    print(shown(text), file=sys.stderr if is_error else sys.stdout, flush=True)


class SafeConsole(Console):
    """The belt: what is put into a table or tree without `shown` comes out as if it had been."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else shown(text), style, control)


def console() -> SafeConsole:
    """The terminal as it is; where there is none, wide enough for every line."""
    found = SafeConsole()
    return found if found.is_terminal else SafeConsole(width=200)

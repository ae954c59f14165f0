"""The one shape of a choice by name, and of a table of them. What an entry makes is imported when it is first wanted.

Example:
    >>> colours = Registry("colour", Entry(name="violet", about="like a violet", make="colorsys:rgb_to_hsv"))
    >>> colours.pick("violet").load()(1.0, 0.0, 0.0)
    (0.0, 1.0, 1.0)
    >>> colours.pick("voilet")
    Traceback (most recent call last):
    ...
    rlhfspec.errors.InvalidRequest: colour: must be one of violet; did you mean violet? (got 'voilet')
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar

from rlhfspec.errors import InvalidRequest, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One thing that can be chosen. Each kind adds fields of its own for what the rest of the system asks about it."""

    name: str  # as a job says it
    about: str  # one line, for the docs
    make: str  # module:name of what makes it
    needs: tuple[str, ...] = ()  # fields of the job's spec without which it cannot be chosen, such as model.drafter

    def load(self) -> Any:
        return imported(self.make)


def imported(place: str) -> Any:
    """What is at module:name.

    >>> imported("math:floor")(2.5)
    2
    """
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


E = TypeVar("E", bound=Entry)


class Registry(Mapping[str, E], Generic[E]):
    """Entries by name, in the order in which they are shown. `field`: the field of the job's spec that names one;
    `beside`: what else it may say that needs nothing, such as auto."""

    def __init__(self, field: str, *entries: E, beside: tuple[str, ...] = ()) -> None:
        self.field = field
        self._beside = beside
        self._entries = {entry.name: entry for entry in entries}
        assert len(self._entries) == len(entries), f"two entries of {field} have one name"

    def __getitem__(self, name: str) -> E:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def where(self, holds: Callable[[E], bool]) -> tuple[str, ...]:
        """The names of the entries that `holds` is true of."""
        return tuple(name for name, entry in self._entries.items() if holds(entry))

    def missing(self, need: str) -> str:
        """What is said to a job that chose an entry without the field that it needs.

        >>> entries = Entry(name="a", about="", make=""), Entry(name="b", about="", make="", needs=("model.drafter",))
        >>> Registry("f", *entries, beside=("auto",)).missing("model.drafter")
        'needs model.drafter; without one take a or auto'
        """
        others = (*self.where(lambda entry: not entry.needs), *self._beside)
        return f"needs {need}; without one take {' or '.join(others)}"

    def pick(self, name: str) -> E:
        """Raises InvalidRequest, naming what there is, for a name that is not in the table."""
        if name not in self._entries:
            problem = f"must be one of {', '.join(self._entries)}{did_you_mean(name, self._entries)}"
            raise InvalidRequest(self.field, name, problem)
        return self._entries[name]


def docs_table(columns: Mapping[str, Callable[[E], str]], registry: Registry[E]) -> str:
    """A table of Markdown, one row an entry.

    >>> print(docs_table({"name": lambda entry: entry.name}, Registry("f", Entry(name="a", about="", make=""))))
    | name |
    |---|
    | a |
    """
    rows = [list(columns), *([cell(entry) for cell in columns.values()] for entry in registry.values())]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]])

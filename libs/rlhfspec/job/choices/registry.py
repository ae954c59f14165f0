"""The one shape of a choice by name, and of a table of them. What an entry makes is imported when it is first wanted.

Example:
    >>> colours = Registry("colour", Entry(name="violet", about="like a violet", make="colorsys:rgb_to_hsv"))
    >>> colours["violet"].load()(1.0, 0.0, 0.0)
    (0.0, 1.0, 1.0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar


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

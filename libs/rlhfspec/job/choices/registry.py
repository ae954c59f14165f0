"""Registry of named choices, whose implementations are imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Named choice with its implementation."""

    name: str  # as written in a job
    about: str  # one line, for the docs
    make: str  # module:name of the implementation
    needs: tuple[str, ...] = ()  # fields of the job's spec that it requires, such as model.drafter

    def load(self) -> Any:
        return imported(self.make)


def imported(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


E = TypeVar("E", bound=Entry)


class Registry(Mapping[str, E], Generic[E]):
    """Entries by name for a job `field`, in display order. `beside`: further values it accepts, without entries."""

    def __init__(self, field: str, *entries: E, beside: tuple[str, ...] = ()) -> None:
        self.field = field
        self._beside = beside
        self._entries = {entry.name: entry for entry in entries}
        assert len(self._entries) == len(entries), f"two entries of {field} have the same name"

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
        return tuple(name for name, entry in self._entries.items() if holds(entry))

    def missing(self, need: str) -> str:
        """Return the message for a choice whose needed field `need` is not set."""
        others = (*self.where(lambda entry: not entry.needs), *self._beside)
        return f"needs {need}; without one use {' or '.join(others)}"

"""One generator's word after the other's, as one story: where a sample's stay ends its move begins, and so on.

Each process tells what it saw by its own clock. A destination has a sample a moment before its source hears so, and
until it does the sample stood still; a generator that was killed told no end; and what was delivered anew was in no
queue while the first one had it.

Example:
    >>> shared = {"run": "3f2a", "sample": "sums/3/7/1", "stage": "generator", "step": 3}
    >>> first = Span(name="generation", worker=0, began=1.0, ended=4.0, **shared)
    >>> move = Span(name="move", worker=0, began=4.0, ended=4.2, attributes={"how": "kv"}, **shared)
    >>> second = Span(name="generation", worker=1, began=4.1, ended=9.0, stay=2, **shared)
    >>> [(span.began, span.ended) for span in joined([first, move, second])]
    [(1.0, 4.0), (4.0, 4.2), (4.2, 9.0)]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from rlhfspec.telemetry.spans import Span

WENT_ON = ("kv", "tokens", "lost")  # how moves end that end a stay


def joined(spans: Sequence[Span]) -> list[Span]:
    """Of one sample. What is neither a stay nor a move stays as it was."""
    chains: dict[int, list[Span]] = {}
    for span in sorted(filter(_is_part, spans), key=lambda span: (span.delivery, span.stay, span.name == "move")):
        chains.setdefault(span.delivery, []).append(replace(span))
    for chain in chains.values():
        for before, after in pairwise(chain):
            _join(before, after)
    for earlier, later in pairwise(chains.values()):
        _deliver_anew(earlier[-1], later[0])
    rest = [span for span in spans if not _is_part(span)]
    if chains:
        _end_when_published(list(chains.values())[-1][-1], rest)
    return [*(part for chain in chains.values() for part in chain), *rest]


def _is_part(span: Span) -> bool:
    """Of the way from one generator to another. A move that came to nothing interrupted a stay, and is none."""
    return span.name == "generation" or (span.name == "move" and span.attributes.get("how") in WENT_ON)


def _join(before: Span, after: Span) -> None:
    _until(before, after)
    before.ended = max(before.began, min(before.ended, after.ended))  # it may be finished before its source hears
    after.began = max(after.began, before.ended)
    after.ended = max(after.ended, after.began)


def _deliver_anew(before: Span, after: Span) -> None:
    _until(before, after)
    if after.sent is not None:
        after.sent = min(max(after.sent, before.ended), after.began)


def _end_when_published(last: Span, rest: Sequence[Span]) -> None:
    """Its worker may be killed before it told of that; but the one that took the sample says when it was out."""
    published = [span.sent for span in rest if span.sent is not None]
    if last.is_open and published:
        last.ended = max(last.began, min(published))


def _until(before: Span, after: Span) -> None:
    """How a stay in vain, or a move that is not confirmed, ended is not told; but what came after it is."""
    if before.is_open or before.attributes.get("how") == "lost":
        before.ended = max(before.began, after.began)

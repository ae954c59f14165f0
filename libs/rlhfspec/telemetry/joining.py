"""Merging of a sample's spans into one sequence of stays (times on one generator) and moves.

Clocks differ, killed generators report no end, and a destination has a sample before its source knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from rlhfspec.telemetry.spans import Span

WENT_ON = ("kv", "tokens", "lost")  # outcomes of moves that end a stay


def joined(spans: Sequence[Span]) -> list[Span]:
    """Return the spans of one sample, its stays and moves joined, the others unchanged."""
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
    """Return whether a span is a stay, or a move that ended one."""
    return span.name == "generation" or (span.name == "move" and span.attributes.get("how") in WENT_ON)


def _join(before: Span, after: Span) -> None:
    _until(before, after)
    # The destination may finish it before the source knows of the move.
    before.ended = max(before.began, min(before.ended, after.ended))
    after.began = max(after.began, before.ended)
    after.ended = max(after.ended, after.began)


def _deliver_anew(before: Span, after: Span) -> None:
    _until(before, after)
    if after.sent is not None:
        after.sent = min(max(after.sent, before.ended), after.began)


def _end_when_published(last: Span, rest: Sequence[Span]) -> None:
    """End an open last stay at the time when its sample was published."""
    published = [span.sent for span in rest if span.sent is not None]
    if last.is_open and published:
        last.ended = max(last.began, min(published))


def _until(before: Span, after: Span) -> None:
    """End an abandoned stay, or an unconfirmed move, at the begin of its successor."""
    if before.is_open or before.attributes.get("how") == "lost":
        before.ended = max(before.began, after.began)

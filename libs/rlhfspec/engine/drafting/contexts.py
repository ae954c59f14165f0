"""Index of the tokens that followed contexts of 16, 8, 4 and 2 tokens in growing texts.

A longer context's probability of unseen tokens goes to the next shorter one. A hash collision only costs speed.

>>> index = ContextIndex()
>>> index.add((1, 2, 3, 1, 2, 3, 1, 2), start=0)
>>> tokens, log_chances, log_rest = index.continuations((1, 2, 3, 1, 2))
>>> tokens, log_chances[0] > log_rest
((3,), True)
"""

from __future__ import annotations

import math
from itertools import islice

ORDERS = (16, 8, 4, 2)  # longest first
LONGEST = ORDERS[0]
_MOST_CANDIDATES = 6
# Weight that each distinct continuation gives to unseen ones: long contexts repeat, short ones do not
_OPENNESS = {16: 0.05, 8: 0.2, 4: 0.8, 2: 2.0}

Continuations = tuple[tuple[int, ...], tuple[float, ...], float]
"""Candidate tokens, the logarithms of their chances (not sorted), and that of the chance of any other token."""

_NO_CONTINUATIONS: Continuations = ((), (), 0.0)
_LEAST_REST = 1e-6


def _alone(order: int) -> tuple[tuple[float, ...], float]:
    chance = 1.0 / (1.0 + _OPENNESS[order])
    return (math.log(chance),), math.log(1.0 - chance)


_LONE_CHANCES = {order: _alone(order) for order in ORDERS}


class ContextIndex:
    """Counts of next tokens by context. Beyond `max_contexts` the older half is dropped."""

    def __init__(self, max_contexts: int = 1 << 17) -> None:
        self._max_contexts = max_contexts
        self._seen: dict[int, int | dict[int, int]] = {}  # a bare token: seen once
        self._ready: dict[int, Continuations] = {}  # blended results, until seen again

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, tokens: tuple[int, ...], *, start: int) -> None:
        """Count tokens[start:] after their contexts; tokens before `start` only serve as context."""
        seen, ready = self._seen, self._ready
        for order in ORDERS:
            for i in range(max(start, order), len(tokens)):
                context, token = hash(tokens[i - order : i]), tokens[i]
                known = seen.get(context)
                if known is None:
                    seen[context] = token
                elif known.__class__ is dict:
                    known[token] = known.get(token, 0) + 1
                    ready.pop(context, None)
                elif known == token:
                    seen[context] = {token: 2}
                else:
                    seen[context] = {known: 1, token: 1}  # type: ignore[dict-item]
        if len(seen) > self._max_contexts:
            self._seen = dict(islice(seen.items(), len(seen) // 2, None))
            ready.clear()

    def continuations(self, context: tuple[int, ...]) -> Continuations:
        seen = self._seen
        for place, order in enumerate(ORDERS):
            key = hash(context[-order:])
            known = seen.get(key)
            if known is None:
                continue
            if known.__class__ is int and order >= 8:
                log_chances, log_rest = _LONE_CHANCES[order]
                return (known,), log_chances, log_rest
            found = self._ready.get(key)
            if found is None:
                counts = {known: 1} if known.__class__ is int else known
                found = self._ready[key] = self._blended(counts, context, place)  # type: ignore[arg-type]
            return found
        return _NO_CONTINUATIONS

    def _blended(self, counts: dict[int, int], context: tuple[int, ...], place: int) -> Continuations:
        openness = _OPENNESS[ORDERS[place]] * len(counts)
        total = sum(counts.values())
        weight = 1.0 / (total + openness)
        if len(counts) > _MOST_CANDIDATES:
            counts = dict(sorted(counts.items(), key=lambda item: -item[1])[:_MOST_CANDIDATES])
        chances = {token: count * weight for token, count in counts.items()}
        if total < 4 and place + 1 < len(ORDERS):
            shorter = self._seen.get(hash(context[-ORDERS[place + 1] :]))
            if shorter.__class__ is dict:
                open_there = _OPENNESS[ORDERS[place + 1]] * len(shorter)
                share = openness * weight / (sum(shorter.values()) + open_there)
                for token, count in islice(shorter.items(), _MOST_CANDIDATES):
                    chances[token] = chances.get(token, 0.0) + count * share
        rest = max(1.0 - sum(chances.values()), _LEAST_REST)
        return tuple(chances), tuple(map(math.log, chances.values())), math.log(rest)

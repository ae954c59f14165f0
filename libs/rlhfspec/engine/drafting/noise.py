"""Noise of the law (docs/law.md) for a few tokens: Philox4x32-10 on 64-bit lanes of one large Python integer.

>>> [f"{word:08x}" for word in philox((0, 0, 0, 0), (0, 0))]
['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
>>> gumbels([7, 7], [0, 3], [5, 200]) == [gumbel(7, 0, 5), gumbel(7, 3, 200)]
True
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF
_ROUNDS = 10
_LANE_BYTES = 8
_MOST_LANES = 128  # longer numbers leave the fastest cache


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the four random words of one counter; reference for the lanes below."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(_ROUNDS):
        product0, product1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _WORD, (product0 >> 32) ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
    return c0, c1, c2, c3


def gumbel(seed: int, position: int, token: int) -> float:
    """Return the Gumbel noise of one token; reference for `gumbels`."""
    word = philox((token // 4, position, 0, 0), (seed & _WORD, seed >> 32))[token % 4]
    return -math.log(-math.log1p(-(word + 0.5) / 2**32))


def gumbels(seeds: Sequence[int], positions: Sequence[int], tokens: Sequence[int]) -> list[float]:
    if len(tokens) > _MOST_LANES:
        head, tail = slice(_MOST_LANES), slice(_MOST_LANES, None)
        return gumbels(seeds[head], positions[head], tokens[head]) + gumbels(seeds[tail], positions[tail], tokens[tail])
    if len(tokens) < 2:
        return [gumbel(*one) for one in zip(seeds, positions, tokens, strict=True)]
    num_lanes = len(tokens)
    low, step0, step1 = _constants(num_lanes)
    c0, c1 = _pack([token >> 2 for token in tokens]), _pack(positions)
    c2 = c3 = 0
    k0, k1 = _pack([seed & _WORD for seed in seeds]), _pack([seed >> 32 for seed in seeds])
    for _ in range(_ROUNDS):
        product0, product1 = _M0 * c0, _M1 * c2
        c0, c1 = (product1 >> 32) & low ^ c1 ^ k0, product1 & low
        c2, c3 = (product0 >> 32) & low ^ c3 ^ k1, product0 & low
        k0, k1 = (k0 + step0) & low, (k1 + step1) & low
    words = [_unpack(word, num_lanes) for word in (c0, c1, c2, c3)]
    log, log1p = math.log, math.log1p
    return [-log(-log1p(-(words[token & 3][lane] + 0.5) / 4294967296.0)) for lane, token in enumerate(tokens)]


@lru_cache(maxsize=1024)
def _constants(num_lanes: int) -> tuple[int, int, int]:
    """Return the low word's mask and the two key increments, repeated in every lane."""
    ones = int.from_bytes(array("Q", [1] * num_lanes).tobytes(), sys.byteorder)
    return ones * _WORD, ones * _W0, ones * _W1


def _pack(words: Sequence[int]) -> int:
    return int.from_bytes(array("Q", words).tobytes(), sys.byteorder)


def _unpack(lanes: int, num_lanes: int) -> array[int]:
    words = array("Q")
    words.frombytes(lanes.to_bytes(num_lanes * _LANE_BYTES, sys.byteorder))
    return words

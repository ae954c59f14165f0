"""Gumbel noise for sampling (docs/law.md) by Philox4x32-10, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key between rounds
MASK32 = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def _multiply(constant: int, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and low 32-bit words of constant * value. int64 overflow leaves all 64 bits correct."""
    product = value * constant
    return (product >> 32) & MASK32, product & MASK32


def philox_4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> Words:
    """Return four random words from four counter and two key words: int64 below 2**32, broadcastable.

    >>> words = philox_4x32(tuple(torch.zeros(4, 1, dtype=torch.int64)), tuple(torch.zeros(2, 1, dtype=torch.int64)))
    >>> [f"{int(word):08x}" for word in words]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return c0, c1, c2, c3


def random_words(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return random words [N, V] in [0, 2**32) for seeds [N] int64 (64 raw bits) and positions [N]."""
    blocks = torch.arange((vocab_size + 3) // 4, device=seeds.device)  # [V/4]; one call of Philox serves four tokens
    seeds, positions = seeds.to(torch.int64)[:, None], positions.to(torch.int64)[:, None]
    zero = torch.zeros_like(positions)
    words = philox_4x32((blocks, positions & MASK32, zero, zero), (seeds & MASK32, (seeds >> 32) & MASK32))
    return torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise G(seed, position, token): [N, V] float64."""
    uniform = (random_words(seeds, positions, vocab_size).to(torch.float64) + 0.5) / 2.0**32  # in (0, 1), exact
    exponential = -torch.log1p(-uniform)  # log1p keeps the bits of small values, which are the winning tail
    return -torch.log(exponential)

"""Text of Python's standard library, every tenth module held out; harder to learn than templated English."""

from __future__ import annotations

import functools
import itertools
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from rlhfspec.tiny.corpus import beginnings, tokens_of

_BETWEEN_DOCUMENTS = "\n\n\n"  # as between top-level functions and classes
_SHORTEST, _LONGEST = 100, 2000  # characters of a document
_HELD_OUT_EVERY = 10


def documents(count: int, *, seed: int, held_out: bool = False) -> list[str]:
    return list(itertools.islice(_shuffled(seed, held_out=held_out), count))


def token_stream(num_tokens: int, *, seed: int) -> list[int]:
    """Return token ids of the training modules, repeated as needed."""
    endless = itertools.chain.from_iterable(_shuffled(each, held_out=False) for each in itertools.count(seed))
    return tokens_of(endless, num_tokens)


def prompts(count: int, *, seed: int, shortest: int = 24, longest: int = 96) -> list[list[int]]:
    return beginnings(_shuffled(seed, held_out=True), count, seed, shortest, longest)


def _shuffled(seed: int, *, held_out: bool) -> Iterator[str]:
    texts = list(_documents(held_out=held_out))
    random.Random(seed).shuffle(texts)
    yield from texts


@functools.cache
def _documents(*, held_out: bool) -> tuple[str, ...]:
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    chosen = [path for i, path in enumerate(modules) if (i % _HELD_OUT_EVERY == 0) is held_out]
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in chosen)
    return tuple(
        piece.strip("\n")[:_LONGEST]
        for text in texts
        for piece in text.split(_BETWEEN_DOCUMENTS)
        if len(piece.strip()) >= _SHORTEST
    )

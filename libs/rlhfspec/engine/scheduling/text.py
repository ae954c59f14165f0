"""Text conversion: prompts to ids, responses to text, and stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as SequenceOf
from typing import Protocol

from rlhfspec.common.arrays import IntArray
from rlhfspec.errors import InvalidRequest


class Tokenizer(Protocol):
    def __call__(self, texts: list[str], *, add_special_tokens: bool = ...) -> Mapping[str, list[list[int]]]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


def encode_prompt(tokenizer: Tokenizer | None, prompt: str | SequenceOf[int]) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return tuple(prompt)
    if tokenizer is None:
        raise InvalidRequest("prompts", prompt[:40], "text needs a tokenizer, and the model folder holds none")
    return tuple(tokenizer.encode(prompt))


def decode(tokenizer: Tokenizer | None, token_ids: SequenceOf[int]) -> str | None:
    return None if tokenizer is None else tokenizer.decode(list(token_ids), skip_special_tokens=True)


def first_stop(tokenizer: Tokenizer, response: IntArray, num_new: int, stops: tuple[str, ...]) -> int | None:
    """Return how many of the last `num_new` tokens to keep, up to the one completing a stop string, else None."""
    for kept in range(1, num_new + 1):
        text = tokenizer.decode(response[: len(response) - num_new + kept].tolist(), skip_special_tokens=True)
        if any(stop in text for stop in stops):
            return kept
    return None


def cut_at_stop(text: str, stops: tuple[str, ...]) -> str:
    """Return the text before the earliest stop string."""
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text

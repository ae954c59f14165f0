"""Text of a response that grows, for streams, and of single tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from rlhfspec.engine.scheduling.text import cut_at_stop

BROKEN = "\N{REPLACEMENT CHARACTER}"  # an incomplete character decodes to it


class TokenTexts:
    """Texts and bytes of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id]))

    def bytes(self, token_id: int) -> list[int] | None:
        """Return a token's bytes, or None if it is a part of a character and the tokenizer does not tell which."""
        text = self.text(token_id)
        if BROKEN not in text:
            return list(text.encode())
        piece = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if found := re.fullmatch("<0x([0-9A-F]{2})>", piece):  # byte fallback, as in Llama 2
            return [int(found[1], 16)]
        numbers = [self._byte_of.get(character) for character in piece]
        return None if None in numbers else [number for number in numbers if number is not None]

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """Return the byte of each character in the vocabulary of a byte-level tokenizer."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        return {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]


class Words:
    """Decoder of one response. All its pieces together are the text of all its tokens, cut at the first stop string."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._held_back = max(map(len, stops), default=1) - 1  # last characters, which may begin a stop string
        self._token_ids: list[int] = []
        self._context, self._settled = 0, 0  # the first token to decode with new ones, and the first new one
        self._text = ""
        self._num_said = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens make certain."""
        self._token_ids.extend(token_ids)
        before = self._decode(self._token_ids[self._context : self._settled])
        text = self._decode(self._token_ids[self._context :])
        if len(text) > len(before) and not text.endswith(BROKEN):
            self._text = cut_at_stop(self._text + text[len(before) :], self._stops)
            self._context, self._settled = self._settled, len(self._token_ids)
        return self._say(self._text[: max(len(self._text) - self._held_back, 0)])

    def end(self) -> str:
        """Return the rest of the text."""
        return self._say(cut_at_stop(self._decode(self._token_ids), self._stops))

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _say(self, text: str) -> str:
        new = text[self._num_said :]
        self._num_said += len(new)
        return new

"""Earlier responses to the same prompt: what the suffix drafter may draft from. They change no token (the law)."""

from __future__ import annotations

from collections import OrderedDict

Tokens = tuple[int, ...]
_MOST_PROMPTS = 4096


class Histories:
    """The newest `keep` responses of each of the prompts seen last.

    >>> histories = Histories(keep=2)
    >>> for response in ((1,), (2,), (3,)):
    ...     histories.add((7, 8), response)
    >>> histories.of((7, 8)), histories.of((9,))
    (((2,), (3,)), ())
    """

    def __init__(self, *, keep: int) -> None:
        self._keep = keep
        self._responses: OrderedDict[Tokens, tuple[Tokens, ...]] = OrderedDict()

    def of(self, prompt: Tokens) -> tuple[Tokens, ...]:
        return self._responses.get(prompt, ())

    def add(self, prompt: Tokens, response: Tokens) -> None:
        self._responses[prompt] = (*self.of(prompt), response)[-self._keep :]
        self._responses.move_to_end(prompt)
        if len(self._responses) > _MOST_PROMPTS:
            self._responses.popitem(last=False)

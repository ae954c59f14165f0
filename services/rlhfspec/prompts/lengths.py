"""Estimated work of prompts, which decides only the order of publication."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from rlhfspec.messages.records import Prompt, Sample

_KEPT_MEANS = 1 << 16
_LENGTH_WEIGHT = 0.25  # weight of a new answer in the running mean


class PromptLengths:
    """Running mean of response lengths, for each recent prompt."""

    def __init__(self) -> None:
        self._means: OrderedDict[int, float] = OrderedDict()  # by prompt hash; collisions are harmless
        self._sum = 0.0

    def add(self, sample: Sample) -> None:
        if sample.finish_reason != "error":
            self.add_length(sample.prompt_token_ids, len(sample.token_ids))

    def add_length(self, prompt: tuple[int, ...], length: int) -> None:
        key = hash(prompt)
        before = self._means.pop(key, None)
        mean = float(length) if before is None else before + _LENGTH_WEIGHT * (length - before)
        self._means[key] = mean
        self._sum += mean - (before or 0.0)
        if len(self._means) > _KEPT_MEANS:
            self._sum -= self._means.popitem(last=False)[1]

    def work(self, prompt: tuple[int, ...]) -> float:
        """Return the expected tokens of prompt and response; unseen prompts get a response of average length."""
        usual = self._sum / len(self._means) if self._means else 0.0
        return len(prompt) + self._means.get(hash(prompt), usual)

    def longest_first(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        """Return prompts by decreasing work, with replicas adjacent because they share KV."""
        return sorted(prompts, key=lambda prompt: -self.work(prompt.token_ids))

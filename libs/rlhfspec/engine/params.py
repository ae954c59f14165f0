"""How one sequence is sampled. Torch-free, so that every stage can read it.

Example:
    >>> SamplingParams(temperature=0.7, top_p=0.95, max_tokens=64).temperature
    0.7
    >>> SamplingParams(temperature=-1)
    Traceback (most recent call last):
    ...
    rlhfspec.errors.InvalidRequest: temperature: must be a finite number >= 0 (got -1)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhfspec.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a sequence's tokens depend on, beside weights, prompt and seed (the law, docs/law.md).

    temperature: 0 is greedy. top_k: 0 keeps every token. top_p: 1.0 keeps every token.
    max_tokens: response length limit. stop_token_ids: kept as the last token, finish_reason "stop".
    stop: strings; generation ends with the first token that completes one (needs a tokenizer).
    ignore_eos: go on past the model's own end-of-sequence token.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = (
            ("temperature", _is_number(self.temperature) and self.temperature >= 0, "must be a finite number >= 0"),
            ("top_k", _is_int(self.top_k) and self.top_k >= 0, "must be a whole number >= 0 (0 keeps every token)"),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "must be in (0, 1]"),
            ("max_tokens", _is_int(self.max_tokens) and self.max_tokens >= 1, "must be a whole number >= 1"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "must hold non-empty strings"),
            ("stop_token_ids", all(_is_int(t) and t >= 0 for t in self.stop_token_ids), "must hold token ids >= 0"),
        )
        for name, holds, problem in checks:
            if not holds:
                raise InvalidRequest(name, getattr(self, name), problem)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

"""Sampling parameters of one sequence. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from rlhfspec.errors import InvalidRequest

LARGEST = 3.4028234663852886e38  # of float32, in which the law reads temperature and top_p


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters. Tokens depend on them, weights, prompt and seed alone (docs/law.md).

        temperature: 0 is greedy. top_k: 0 keeps every token. top_p: 1.0 keeps every token.
        max_tokens: response length limit. stop_token_ids: kept as the last token, finish_reason "stop".
        stop: strings; generation ends with the first token that completes one (needs a tokenizer).
        ignore_eos: continue after the EOS token of the model.

    >>> SamplingParams(temperature=-1)
    Traceback (most recent call last):
    ...
    rlhfspec.errors.InvalidRequest: temperature: must be a number from 0 to 3.4e+38 (got -1)
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p", "max_tokens"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        checks = (
            ("temperature", _is_number(self.temperature) and 0 <= self.temperature <= LARGEST,
             f"must be a number from 0 to {LARGEST:.2g}"),
            ("top_k", is_int(self.top_k) and self.top_k >= 0, "must be a whole number >= 0 (0 keeps every token)"),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "must be in (0, 1]"),
            ("max_tokens", is_int(self.max_tokens) and self.max_tokens >= 1, "must be a whole number >= 1"),
            ("stop", _is_list(self.stop) and all(isinstance(s, str) and s for s in self.stop),
             "must hold non-empty strings"),
            ("stop_token_ids", _is_list(self.stop_token_ids) and all(is_int(t) and t >= 0 for t in self.stop_token_ids),
             "must hold token ids >= 0"),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "must be true or false"),
        )  # fmt: skip
        for name, holds, problem in checks:
            if not holds:
                raise InvalidRequest(name, getattr(self, name), problem)


def plain(value: Any) -> Any:
    """Convert a numpy number to a Python number; return other values unchanged."""
    if is_int(value):
        return int(value)
    return float(value) if not isinstance(value, bool) and isinstance(value, Real) else value


def is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and -LARGEST <= value <= LARGEST  # type: ignore[operator]


def _is_list(value: object) -> bool:
    return isinstance(value, (tuple, list))

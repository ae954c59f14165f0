"""With its KV, its tokens alone, or not at all: by what each has cost so far, and told in words.

Example:
    >>> costs = Costs()
    >>> costs.choose("b", 1000, gain_seconds=1.0).how, costs.choose("b", 1000, gain_seconds=1.0).reason
    ('kv', 'not measured yet')
    >>> costs.learn_prefill(1000, 0.5); costs.learn_link("b", num_bytes=4_000_000, seconds=0.004); costs.learn_size(1000, 4_000_000)
    >>> costs.choose("b", 1000, gain_seconds=1.0)
    MoveChoice(how='kv', reason='4.0 MB in 4 ms, 1000 tokens again in 500 ms')
    >>> costs.learn_link("b", num_bytes=400_000, seconds=1.0)  # the way became slow
    >>> costs.choose("b", 1000, gain_seconds=9.0).how
    'tokens'
    >>> costs.choose("b", 1000, gain_seconds=0.1).how
    'stay'
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LEAST_BYTES = 1 << 18  # of a range that tells of the way's speed
_NEWEST = 0.3  # the weight of what was measured last


@dataclass(frozen=True, slots=True)
class MoveChoice:
    how: Literal["kv", "tokens", "stay"]
    reason: str


class Costs:
    """Of one source; a link's is each peer's own."""

    def __init__(self) -> None:
        self._seconds_a_byte: dict[str, float] = {}
        self._prefill_seconds: float | None = None  # a token
        self.bytes_a_token: float | None = None

    def learn_link(self, peer: str, *, num_bytes: int, seconds: float) -> None:
        """From packing until it was imported there. Small ones say how long the steps of both engines are, and that
        costs nothing: it decodes on."""
        if num_bytes >= LEAST_BYTES:
            known = self._seconds_a_byte.get(peer)
            self._seconds_a_byte[peer] = _newer(known, seconds / num_bytes)

    def learn_prefill(self, num_tokens: int, seconds: float) -> None:
        if num_tokens:
            self._prefill_seconds = _newer(self._prefill_seconds, seconds / num_tokens)

    def learn_size(self, num_tokens: int, num_bytes: int) -> None:
        if num_tokens and num_bytes:
            self.bytes_a_token = num_bytes / num_tokens

    def choose(self, peer: str, num_tokens: int, *, gain_seconds: float, must_go: bool = False) -> MoveChoice:
        """`must_go`: it cannot stay, whatever it costs: its generator is leaving."""
        speed, size, prefill = self._seconds_a_byte.get(peer), self.bytes_a_token, self._prefill_seconds
        if speed is None or size is None or prefill is None:
            return MoveChoice("kv", "not measured yet")
        num_bytes = num_tokens * size
        send, again = num_bytes * speed, num_tokens * prefill
        costs = f"{num_bytes / 1e6:.1f} MB in {send * 1e3:.0f} ms, {num_tokens} tokens again in {again * 1e3:.0f} ms"
        if send <= again:  # it decodes on meanwhile: what it loses is a pause, which the plan knows
            return MoveChoice("kv", costs)
        if again > gain_seconds and not must_go:
            return MoveChoice("stay", f"{costs}: more than the {gain_seconds * 1e3:.0f} ms that it gains")
        return MoveChoice("tokens", costs)


def _newer(known: float | None, measured: float) -> float:
    return measured if known is None else (1 - _NEWEST) * known + _NEWEST * measured

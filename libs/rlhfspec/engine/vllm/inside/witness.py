"""What was drawn, against the slow decoder on the very logits it was drawn from."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlhfspec.engine.oracle import log_softmax, perturbed_scores
from rlhfspec.engine.params import SamplingParams

NEAR_TIE = 1e-5  # of two perturbed scores in float32
_MOST_DIFFERENCE = 1e-4  # of log-probs


class Witness:
    """Looks only while it is asked to: at load."""

    def __init__(self) -> None:
        self.is_watching = False
        self.rows: list[tuple[Any, ...]] = []  # logits [V], token, log-prob, seed, place, temperature, top_k, top_p

    def saw(self, logits: Any, drawn: Any, *parameters: Any) -> None:
        if not self.is_watching:
            return
        columns = [_in_numpy(each) for each in (logits, drawn.tokens, drawn.log_probs, *parameters)]
        self.rows += zip(*columns, strict=True)

    def problems(self) -> list[str]:
        """In words: where a token is not the law's, by more than rounding, or a log-prob is off."""
        found = []
        for logits, token, log_prob, seed, place, temperature, top_k, top_p in self.rows:
            params = SamplingParams(temperature=float(temperature), top_k=int(top_k), top_p=float(top_p))
            scores = perturbed_scores(logits, params, int(seed) & ((1 << 64) - 1), int(place))
            if (lead := float(scores.max() - scores[token])) > NEAR_TIE:
                found.append(f"token {token} at place {place} is not the law's: behind by {lead:.2g}")
            expected = float(log_softmax(logits.astype(np.float64))[token])
            if not abs(expected - log_prob) < _MOST_DIFFERENCE:
                found.append(f"the log-prob at place {place} is {log_prob:.6g}, not {expected:.6g}")
        return found


def _in_numpy(values: Any) -> Any:
    return values if isinstance(values, np.ndarray) else values.cpu().numpy()

"""Check of sampled tokens against the oracle on the same logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlhfspec.engine.oracle import log_softmax, noise, perturbed_scores
from rlhfspec.engine.params import SamplingParams

NEAR_TIE = 1e-5  # of two perturbed scores in float32
_LOG_PROB_TOLERANCE = 1e-4  # of log-probs


class Witness:
    def __init__(self) -> None:
        self.is_watching = False
        self.rows: list[tuple[Any, ...]] = []
        # logits [V], token, log-prob, tempered one, seed, place, temperature, top_k, top_p

    def saw(self, logits: Any, drawn: Any, *parameters: Any) -> None:
        if not self.is_watching:
            return
        seen = (logits, drawn.tokens, drawn.log_probs, drawn.tempered_log_probs, *parameters)
        columns = [_in_numpy(each) for each in seen]
        self.rows += zip(*columns, strict=True)

    def problems(self) -> list[str]:
        found = []
        for logits, token, log_prob, tempered, seed, place, temperature, top_k, top_p in self.rows:
            params = SamplingParams(temperature=float(temperature), top_k=int(top_k), top_p=float(top_p))
            key = int(seed) & ((1 << 64) - 1)
            scores = perturbed_scores(logits, params, key, int(place))
            if (lead := float(scores.max() - scores[token])) > NEAR_TIE:
                found.append(f"token {token} at place {place} is not the expected one: its score is {lead:.2g} lower")
            for name, value, of in (
                ("log-prob", log_prob, logits.astype(np.float64)),
                ("tempered log-prob", tempered, scores - noise(key, int(place), len(scores))),
            ):
                if not abs((expected := float(log_softmax(of)[token])) - value) < _LOG_PROB_TOLERANCE:
                    found.append(f"the {name} at place {place} is {value:.6g}, not {expected:.6g}")
        return found


def _in_numpy(values: Any) -> Any:
    return values if isinstance(values, np.ndarray) else values.cpu().numpy()

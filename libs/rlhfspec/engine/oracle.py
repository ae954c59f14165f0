"""Reference decoder in plain Hugging Face and numpy. It shares no code with the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlhfspec.engine.params import SamplingParams

_MASK = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleTokens:
    token_ids: list[int]
    log_probs: list[float]
    margins: list[float]


@torch.inference_mode()
def decode(model: Any, prompt: list[int], params: SamplingParams, seed: int, stop_ids: tuple[int, ...] = (),
           forced: list[int] | None = None) -> OracleTokens:  # fmt: skip
    """Decode with an unmodified Hugging Face model. `forced` tokens continue the text instead of the chosen ones."""
    tokens, log_probs, margins = list(prompt), [], []
    chosen: list[int] = []
    for position in range(params.max_tokens if forced is None else len(forced)):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].float().numpy()
        scores = perturbed_scores(logits, params, seed, position)
        best = int(np.argmax(scores))
        runner_up = float(np.partition(scores, -2)[-2]) if len(scores) > 1 else -np.inf
        margins.append(float(scores[best]) - runner_up)
        chosen.append(best)
        token = best if forced is None else forced[position]
        log_probs.append(float(log_softmax(logits.astype(np.float64))[token]))
        tokens.append(token)
        if token in stop_ids:
            break
    return OracleTokens(token_ids=chosen, log_probs=log_probs, margins=margins)


def perturbed_scores(logits: npt.NDArray[np.float32], params: SamplingParams, seed: int, position: int,
                     ) -> npt.NDArray[np.float64]:  # fmt: skip
    """Return every token's score with noise (cut: -inf). The law chooses the first maximum."""
    wide = logits.astype(np.float64)
    if params.temperature == 0:
        return wide
    scaled = wide / np.float64(np.float32(params.temperature))
    order = np.lexsort((np.arange(len(logits)), -logits.astype(np.float64)))  # largest first, then lowest id
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        weights = np.exp(scaled[order] - scaled[order[0]])
        cumulative = np.cumsum(weights / weights.sum())
        order = order[: int(np.searchsorted(cumulative, np.float64(np.float32(params.top_p)))) + 1]
    scores = np.full(len(logits), -np.inf)
    scores[order] = (scaled + noise(seed, position, len(logits)))[order]
    return scores


def noise(seed: int, position: int, vocab_size: int) -> npt.NDArray[np.float64]:
    blocks = np.arange(-(-vocab_size // 4), dtype=np.uint64)
    words = philox(blocks, position, seed & _MASK, (seed >> 32) & _MASK)  # [4, blocks]
    uniform = (words.T.ravel()[:vocab_size].astype(np.float64) + 0.5) / 2.0**32
    return -np.log(-np.log1p(-uniform))


def philox(blocks: npt.NDArray[np.uint64], position: int, key0: int, key1: int) -> npt.NDArray[np.uint64]:
    mask = np.uint64(_MASK)
    c0, c1 = blocks, np.full_like(blocks, position)
    c2, c3 = np.zeros_like(blocks), np.zeros_like(blocks)
    for _ in range(10):
        low, high = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (high >> np.uint64(32)) ^ c1 ^ np.uint64(key0), high & mask,
            (low >> np.uint64(32)) ^ c3 ^ np.uint64(key1), low & mask,
        )  # fmt: skip
        key0, key1 = (key0 + 0x9E3779B9) & _MASK, (key1 + 0xBB67AE85) & _MASK
    return np.stack((c0, c1, c2, c3))


def log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())  # type: ignore[no-any-return]

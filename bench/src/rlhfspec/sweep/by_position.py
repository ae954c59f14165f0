"""Comparison of trainer and Hugging Face in bfloat16: their errors from float32 at every position.

An error that grows with the position, such as RoPE frequencies in too few bits, hides in rounding in a short row. One
long row is therefore compared band by band. Mixture-of-experts models use the experts that float32 chooses, where their
own choice is nearly as good; otherwise one early token with other experts could hide everything else.

Example:
    >>> from rlhfspec.sweep.classes import tiny_config, tiny_model
    >>> bands = judge_positions(lambda: tiny_model(tiny_config("qwen2")), num_tokens=128, vocab_size=97)
    >>> [(band.start, band.stop, band.ratio < 1.5) for band in bands]
    [(0, 127, True)]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rlhfspec.huggingface.proof.reference import ExpertChoices, FollowedChoices
from rlhfspec.huggingface.structure.attention import attending
from rlhfspec.training.modeling.loading import prepared
from rlhfspec.training.modeling.log_probs import TorchForward
from rlhfspec.training.modeling.packed import pack_sequences
from rlhfspec.training.scoring.log_probs import log_probs_reference

MOST_TIMES_WORSE = 1.5  # times as far from float32 as Hugging Face; the sweep's types reach 1.24
_FIRST_BAND = 128  # tokens; each next band ends twice as far
_LEAST = 1e-3  # smaller errors are ignored


@dataclass(frozen=True, slots=True)
class Band:
    start: int
    stop: int
    ratio: float  # the trainer's mean error to Hugging Face's

    def __str__(self) -> str:
        return (
            f"{self.ratio:.2f} times as far from float32's as Hugging Face's at positions {self.start} to {self.stop}"
        )


def judge_positions(make: Callable[[], Any], *, num_tokens: int, vocab_size: int, seed: int = 0) -> list[Band]:
    """Return the trainer's errors relative to Hugging Face's on a random row, by band; raises UnsupportedModel."""
    model = make()
    row = torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    rounded = _loaded_in_bfloat16(model)
    model.load_state_dict(rounded.state_dict())  # the same weights, whatever loading did to them
    with ExpertChoices() as choices:
        truth = _plain_log_probs(model, row)
    experts = [indices for _, indices in choices.made]
    with FollowedChoices(experts):
        theirs = _plain_log_probs(rounded, row)
    del rounded
    model = prepared(model, dtype="bfloat16", max_context=num_tokens)
    with torch.no_grad(), FollowedChoices([indices[:-1] for indices in experts]):  # a packed row lacks its last token
        ours = TorchForward(model, 1.0)(pack_sequences([row[:1]], [row[1:]])).log_probs
    return [
        Band(start, stop, _error(ours[start:stop], truth[start:stop]) / _error(theirs[start:stop], truth[start:stop]))
        for start, stop in _bands(len(truth))
    ]


def _bands(num_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of bands that double in length.

    >>> list(_bands(300))
    [(0, 128), (128, 256), (256, 300)]
    """
    start, stop = 0, _FIRST_BAND
    while stop < num_tokens:
        yield start, min(stop, num_tokens)
        start, stop = stop, 2 * stop
    yield start, num_tokens


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return max(float((found - wanted).abs().mean()), _LEAST)


def _loaded_in_bfloat16(model: Any) -> Any:
    tied = getattr(model, "all_tied_weights_keys", {})
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    return type(model).from_pretrained(None, config=model.config, state_dict=weights, dtype=torch.bfloat16)


def _plain_log_probs(model: Any, row: list[int]) -> torch.Tensor:
    """Return [tokens - 1]: log-probs of all tokens but the first, by Hugging Face with eager attention."""
    with attending(model, "eager"):
        return torch.tensor(log_probs_reference(model, row[:1], row[1:], 1.0))

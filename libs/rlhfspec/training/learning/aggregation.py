"""Token weights of the loss, sum(weights * token_loss), fixed before a mini-batch is split."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

LossAggregation = Literal["token-mean", "sequence-mean-token-mean", "sequence-sum-constant"]


def token_weights(lengths: Tensor, aggregation: LossAggregation, constant: int) -> Tensor:
    """Return a mini-batch's token weights [T], float64, from its `lengths` [n].

    token-mean: 1 / T. sequence-mean-token-mean: 1 / (n |y|). sequence-sum-constant: 1 / (n maxTokens).
    """
    num_samples, num_tokens = len(lengths), int(lengths.sum())
    if aggregation == "token-mean":
        return torch.full((num_tokens,), 1.0 / num_tokens, dtype=torch.float64)
    if aggregation == "sequence-sum-constant":
        return torch.full((num_tokens,), 1.0 / (num_samples * constant), dtype=torch.float64)
    return per_token(1.0 / (num_samples * lengths.double()), lengths)


def per_token(per_sample: Tensor, lengths: Tensor) -> Tensor:
    return torch.repeat_interleave(per_sample, lengths)


def sample_sums(per_token_numbers: Tensor, lengths: Tensor) -> Tensor:
    sums: Tensor = torch.segment_reduce(per_token_numbers, "sum", lengths=lengths)
    return sums


def token_indices(lengths: Tensor, samples: Tensor) -> Tensor:
    """Return the flat indices of these samples' tokens, sample by sample.

    >>> token_indices(torch.tensor([2, 1, 3]), torch.tensor([2, 0]))
    tensor([3, 4, 5, 0, 1])
    """
    starts = lengths.cumsum(0) - lengths  # [n]
    chosen = lengths[samples]
    within = torch.arange(int(chosen.sum())) - torch.repeat_interleave(chosen.cumsum(0) - chosen, chosen)
    return torch.repeat_interleave(starts[samples], chosen) + within

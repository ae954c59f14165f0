"""Results of a step's forwards: values before the first update, metric sums, and non-finite numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.training.learning.algorithms import TokenTerms
from rlhfspec.training.learning.network import Update
from rlhfspec.training.learning.rollouts import Rollouts
from rlhfspec.training.modeling.log_probs import TokenLogProbs


class Tally:
    def __init__(self, num_tokens: int) -> None:
        self.is_complete = False  # has the tokens of all ranks
        self.problem: str | None = None  # the first non-finite number, and its sample
        self.log_probs = torch.zeros(num_tokens)  # [T] before the first update
        self.untempered = torch.zeros(num_tokens)  # [T] likewise, at temperature 1
        self.entropy = torch.zeros(num_tokens)
        self.has_run = torch.zeros(num_tokens, dtype=torch.bool)  # [T] whether a forward gave the token's numbers
        self._losses: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._updates: dict[str, list[tuple[float, float]]] = {}  # by model: norm and learning rate of each

    def keep(self, tokens: Tensor, said: TokenLogProbs) -> None:
        """Store a forward's log-probs and entropy `said` at the flat indices `tokens`, from before any update."""
        assert not self.is_complete, "every token has been kept"
        self.log_probs[tokens] = said.log_probs.detach().cpu()
        self.untempered[tokens] = said.untempered.cpu()
        self.entropy[tokens] = said.entropy.detach().cpu()
        self.has_run[tokens] = True

    def share(self, ranks: Ranks) -> None:
        """Add up the stored values over ranks, each of which ran some of the tokens."""
        if not self.is_complete:
            self.log_probs, self.untempered, self.entropy = map(
                ranks.add, (self.log_probs, self.untempered, self.entropy)
            )
            self.has_run = ranks.add(self.has_run.float()) > 0
            self.is_complete = True

    def watch(self, ids: Sequence[str], lengths: Sequence[int], numbers: Tensor, what: str) -> None:
        """Record the first sample (ids, lengths [n]) with a non-finite value in numbers [t], described by `what`."""
        if self.problem is None and not bool(torch.isfinite(numbers).all()):
            bad = [not bool(torch.isfinite(part).all()) for part in torch.split(numbers, list(lengths))]
            self.problem = f"{what} of sample {ids[bad.index(True)]} are not finite"

    def add(self, terms: TokenTerms) -> None:
        self._losses.update(terms.losses)
        self._sums.update(terms.sums)

    def add_update(self, model: str, update: Update) -> None:
        self._updates.setdefault(model, []).append((update.grad_norm, update.learning_rate))

    def metrics(self, rollouts: Rollouts, ranks: Ranks, *, num_terms: int) -> dict[str, float]:
        """Return the step's metrics. num_terms: trained tokens of all epochs."""
        of_ranks = ranks.gather_of_micro_batches([self._losses, self._sums, self._updates])
        losses, sums = (_added([each[place] for each in of_ranks]) for place in (0, 1))
        updates_of: dict[str, list[tuple[float, float]]] = {}
        for *_, updates in reversed(of_ranks):
            updates_of = updates | updates_of
        num_updates = len(updates_of["policy"])
        metrics = {name: total / num_updates for name, total in losses.items()}
        metrics |= {name: total / num_terms for name, total in sums.items()}
        metrics["clip_fraction"] = metrics["clip_fraction_low"] + metrics["clip_fraction_high"]
        for model, updates in updates_of.items():
            prefix = "" if model == "policy" else f"{model}_"
            metrics[f"{prefix}grad_norm"] = sum(norm for norm, _ in updates) / len(updates)
            metrics[f"{prefix}learning_rate"] = updates[-1][1]
        difference = (self.untempered.double() - rollouts.log_probs.double()).abs()[self.has_run]
        metrics["log_prob_difference_max"] = float(difference.max())
        metrics["log_prob_difference_mean"] = float(difference.mean())
        return metrics


def _added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)

"""Learning copy of an EAGLE-3 head, which drafts several tokens deep in training as it does later."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rlhfspec.engine.distilling.lessons import Lesson
from rlhfspec.errors import InvalidRequest
from rlhfspec.huggingface.heads.eagle import EagleHead

_NEW_RATE, _RATE = 2e-3, 1e-4  # of heads that know nothing, and of others
_WEIGHTS = (1.0, 0.8, 0.64)  # of the loss, by depth
_FIXED = ("lm_head.", "embed_tokens.")  # parts that stay as they are
_NO_CHANCE = -1e4  # log-prob of a token that the head cannot draft
_LEAST_CHANCE = 1e-30
_WARM_UP_STEPS = 50
_AVERAGE_DECAY = 0.99  # weight of the old average per optimizer step; less in the first steps


class EagleStudent:
    """Copy of a head trained on the target's distribution (KL loss); an average of its recent weights drafts."""

    def __init__(self, head: EagleHead, policy: Any = None, device: str = "cpu") -> None:
        """Make the head learn, in float32. Without `policy`, it only takes what was learnt."""
        self.model = head.to(device, torch.float32)
        self._policy = policy
        self._learning = {name: each for name, each in head.named_parameters() if not name.startswith(_FIXED)}
        for parameter in self._learning.values():
            parameter.requires_grad_(True)
        self._at_first = {name: p.detach().clone() for name, p in self._learning.items()}
        self._average = {name: p.detach().clone() for name, p in self._learning.items()}
        self._num_steps = 0
        self._rate = _NEW_RATE if head.is_new else _RATE
        self._optimizer = torch.optim.AdamW(self._learning.values(), lr=self._rate, weight_decay=0.0)
        self._learn_ids()

    def learn(self, lessons: Sequence[Lesson]) -> float:
        """Take one optimizer step and return the loss before it. A non-finite loss resets to the initial weights."""
        with torch.enable_grad():
            loss = self._loss(lessons)
            loss.backward()  # type: ignore[no-untyped-call]
        self._num_steps += 1
        self._optimizer.param_groups[0]["lr"] = self._rate * min(self._num_steps / _WARM_UP_STEPS, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        value = float(loss.detach())
        if math.isfinite(value):
            self._take_into_the_average()
        else:
            self._start_over()
        return value

    @torch.no_grad()
    def law(self, lessons: Sequence[Lesson], *, at_first: bool = False) -> tuple[float, ...]:
        """Return the chance that head and target choose the same token under the same noise, by depth."""
        with self._drafting(at_first):
            return tuple(float(chance_of_law(*pair).mean()) for pair in self._log_probs(lessons))

    def state_dict(self, *, at_first: bool = False) -> dict[str, torch.Tensor]:
        with self._drafting(at_first):
            return dict(self.model.state_dict())

    def learnt(self, *, at_first: bool = False) -> dict[str, torch.Tensor]:
        return {name: tensor.to("cpu", copy=True) for name, tensor in self._drafts_with(at_first).items()}

    @torch.no_grad()
    def take(self, learnt: Mapping[str, torch.Tensor]) -> None:
        if learnt.keys() != self._learning.keys():
            other = min(learnt.keys() ^ self._learning.keys())
            raise InvalidRequest("drafter", other, "the learnt weights belong to another drafter")
        for name, parameter in self._learning.items():
            if learnt[name].shape != parameter.shape or learnt[name].dtype != parameter.dtype:
                raise InvalidRequest("drafter", name, "the learnt weights belong to another drafter")
            if not learnt[name].isfinite().all():
                raise InvalidRequest("drafter", name, "the learnt weights hold NaN or infinity")
        for name, parameter in self._learning.items():
            parameter.copy_(learnt[name])
            self._average[name].copy_(learnt[name])

    def draft_with(self, token_ids: Sequence[int], weight: torch.Tensor) -> None:
        """Draft these tokens, whose rows of the policy's output head are `weight`."""
        self.model.take_tokens(token_ids, weight)
        self._learn_ids()

    def _drafts_with(self, at_first: bool) -> dict[str, torch.Tensor]:
        return self._at_first if at_first else self._average

    def _loss(self, lessons: Sequence[Lesson]) -> torch.Tensor:
        losses = [
            (labels.exp() * (labels - log_probs)).sum(-1).mean() for log_probs, labels in self._log_probs(lessons)
        ]
        return torch.stack([weight * loss for weight, loss in zip(_WEIGHTS, losses, strict=False)]).sum()

    @torch.no_grad()
    def _take_into_the_average(self) -> None:
        kept = min(_AVERAGE_DECAY, self._num_steps / (self._num_steps + 9.0))
        for name, parameter in self._learning.items():
            self._average[name].lerp_(parameter, 1.0 - kept)

    @torch.no_grad()
    def _start_over(self) -> None:
        for name, parameter in self._learning.items():
            parameter.copy_(self._at_first[name])
            self._average[name].copy_(self._at_first[name])
        self._optimizer.state.clear()
        self._num_steps = 0

    @contextmanager
    def _drafting(self, at_first: bool) -> Iterator[None]:
        """Use the averaged weights (`at_first`: the initial ones) within the block."""
        drafts_with = self._drafts_with(at_first)
        self._swap(drafts_with)
        try:
            yield
        finally:
            self._swap(drafts_with)

    def _swap(self, held: dict[str, torch.Tensor]) -> None:
        for name, parameter in self._learning.items():
            parameter.data, held[name] = held[name], parameter.data

    def _learn_ids(self) -> None:
        ids = self.model.token_ids
        self._draft_ids = ids.new_full((self.model.config.vocab_size,), -1)
        self._draft_ids[ids] = torch.arange(len(ids), device=ids.device)

    def _log_probs(self, lessons: Sequence[Lesson]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the head's and the target's log-probs [n, K] of the label tokens, for each depth of the draft."""
        head, device = self.model, self._draft_ids.device
        counts = [lesson.num_labels - 1 for lesson in lessons]  # inputs: a state with a label, and the token after it
        size, width = len(lessons), max(counts)
        tokens = torch.zeros((size, width + len(_WEIGHTS)), dtype=torch.int64)
        tapped = torch.zeros((size, width, head.fc.in_features))
        for index, (lesson, count) in enumerate(zip(lessons, counts, strict=True)):
            tokens[index, : count + 1] = torch.from_numpy(lesson.tokens.astype(np.int64))
            tapped[index, :count] = lesson.states[:count]
        with torch.no_grad():
            embed = head.embed_tokens or self._policy.get_input_embeddings()
            embedded = embed(tokens.to(device)).float()
        states = head.fc(tapped.to(device)).flatten(0, 1)
        earlier: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values by depth
        for depth in range(min(len(_WEIGHTS), width)):
            places = (torch.arange(width, device=device) + depth).repeat(size)
            residual, x = head.inputs(embedded[:, depth : depth + width].flatten(0, 1), states)
            earlier.append(head.keys_and_values(x, places))
            states = head.states(_attend(head.queries(x, places), earlier, size), residual)
            chosen = [index * width + np.arange(max(count - depth, 0)) for index, count in enumerate(counts)]
            rows = torch.from_numpy(np.concatenate(chosen)).to(device)
            yield self._of_labels(head.logits(states[rows]), lessons, first=1 + depth)

    def _of_labels(
        self, logits: torch.Tensor, lessons: Sequence[Lesson], first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = logits.device
        ids = torch.from_numpy(np.concatenate([lesson.label_ids[first:] for lesson in lessons]).astype(np.int64))
        labels = torch.from_numpy(np.concatenate([lesson.label_log_probs[first:] for lesson in lessons])).float()
        counts = [len(lesson.label_ids[first:]) for lesson in lessons]
        each = np.repeat([lesson.temperature for lesson in lessons], counts).astype(np.float32)
        draft_ids = self._draft_ids[ids.to(device)]
        log_probs = (logits / torch.from_numpy(each).to(device)[:, None]).log_softmax(-1).gather(-1, draft_ids.clamp(0))
        is_known = draft_ids >= 0
        return log_probs.where(is_known, _NO_CHANCE), labels.to(device).where(is_known, _NO_CHANCE)


def chance_of_law(log_probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the chances [n] that noisy argmaxes agree, of distributions whose likeliest tokens [n, K] are given.

    >>> both = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    >>> chance_of_law(both, torch.tensor([[0.5, 0.5], [0.1, 0.9]]).log()).round(decimals=3)
    tensor([1.0000, 0.2000])
    """
    p, q = labels.exp().clamp(_LEAST_CHANCE), log_probs.exp().clamp(_LEAST_CHANCE)
    others = torch.maximum(p[:, None] / p[:, :, None], q[:, None] / q[:, :, None]).sum(-1)
    rest = ((1 - each.sum(-1, keepdim=True)).clamp(0) / each for each in (p, q))
    return (1 / sum(rest, others)).sum(-1)


def _attend(query: torch.Tensor, earlier: list[tuple[torch.Tensor, torch.Tensor]], size: int) -> torch.Tensor:
    """Attend from rows [N, heads, dim] to the first depth's rows up to their own, and to their own of later depths."""
    (keys, values), *own = [tuple(_by_query(states, query.shape[1]) for states in pair) for pair in earlier]
    query, keys, values = (_by_lesson(states, size) for states in (query, keys, values))
    width = query.shape[2]
    scores = query @ keys.transpose(2, 3)
    scores = scores.masked_fill(torch.ones(width, width, dtype=torch.bool, device=query.device).triu(1), -torch.inf)
    own_keys, own_values = ([_by_lesson(pair[place], size) for pair in own] for place in (0, 1))
    scores = torch.cat([scores, *((query * key).sum(-1, keepdim=True) for key in own_keys)], -1)
    chances = (scores * query.shape[3] ** -0.5).softmax(-1)
    found: torch.Tensor = chances[..., :width] @ values
    for depth, value in enumerate(own_values):
        found = found + chances[..., width + depth, None] * value
    return found.transpose(1, 2).flatten(0, 1)


def _by_lesson(states: torch.Tensor, size: int) -> torch.Tensor:
    """Return states [N, heads, dim] as [lessons, heads, width, dim]."""
    return states.view(size, -1, *states.shape[1:]).transpose(1, 2)


def _by_query(states: torch.Tensor, num_heads: int) -> torch.Tensor:
    return states.repeat_interleave(num_heads // states.shape[1], dim=1)

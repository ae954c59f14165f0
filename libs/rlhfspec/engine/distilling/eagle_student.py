"""Learning copy of an EAGLE-3 head, which drafts several tokens deep in training as it does later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rlhfspec.engine.distilling.lessons import Lesson
from rlhfspec.engine.distilling.student import LearningCopy
from rlhfspec.huggingface.heads.eagle import EagleHead

_NEW_RATE, _RATE = 2e-3, 1e-4  # of heads that know nothing, and of others
_DEPTHS = 3
_FIXED = ("lm_head.", "embed_tokens.")  # parts that stay as they are
_NO_CHANCE = -1e4  # log-prob of a token that the head cannot draft


class EagleStudent(LearningCopy):
    def __init__(self, head: EagleHead, policy: Any = None, device: str = "cpu") -> None:
        """Make the head learn, in float32. Without `policy`, it only takes what was learnt."""
        head = head.to(device, torch.float32)
        self._policy = policy
        learning = {name: each for name, each in head.named_parameters() if not name.startswith(_FIXED)}
        for parameter in learning.values():
            parameter.requires_grad_(True)
        rate = _NEW_RATE if head.is_new else _RATE
        super().__init__(head, learning, [torch.optim.AdamW(learning.values(), lr=rate, weight_decay=0.0)])
        self._learn_ids()

    def draft_with(self, token_ids: Sequence[int], weight: torch.Tensor) -> None:
        """Draft these tokens, whose rows of the policy's output head are `weight`."""
        self.model.take_tokens(token_ids, weight)
        self._learn_ids()

    def _learn_ids(self) -> None:
        ids = self.model.token_ids
        self._draft_ids = ids.new_full((self.model.config.vocab_size,), -1)
        self._draft_ids[ids] = torch.arange(len(ids), device=ids.device)

    def _log_probs(self, lessons: Sequence[Lesson]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        head, device = self.model, self._draft_ids.device
        counts = [lesson.num_labels - 1 for lesson in lessons]  # inputs: a state with a label, and the token after it
        size, width = len(lessons), max(counts)
        tokens = torch.zeros((size, width + _DEPTHS), dtype=torch.int64)
        tapped = torch.zeros((size, width, head.fc.in_features))
        for index, (lesson, count) in enumerate(zip(lessons, counts, strict=True)):
            assert lesson.states is not None, "recorded with states"
            tokens[index, : count + 1] = torch.from_numpy(lesson.tokens[-count - 1 :].astype(np.int64))
            tapped[index, :count] = lesson.states[:count]
        with torch.no_grad():
            embed = head.embed_tokens or self._policy.get_input_embeddings()
            embedded = embed(tokens.to(device)).float()
        states = head.fc(tapped.to(device)).flatten(0, 1)
        earlier: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values by depth
        for depth in range(min(_DEPTHS, width)):
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

"""Learning copy of a drafter, with its optimizers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rlhfspec.engine.distilling.lessons import Lesson
from rlhfspec.engine.distilling.muon import Muon
from rlhfspec.errors import InvalidRequest
from rlhfspec.huggingface.structure.anatomy import examine
from rlhfspec.huggingface.structure.causal_lm import CausalLM, hidden_of

MUON_RATE, ADAM_RATE = 1e-2, 1e-3
_WEIGHTS = (1.0, 0.8, 0.64)  # of the loss, by depth
_WARM_UP_STEPS = 50
_AVERAGE_DECAY = 0.99  # weight of the old average per optimizer step; less in the first steps


class LearningCopy(ABC):
    """Copy of a drafter trained on the target's distribution (KL loss); an average of its recent weights drafts."""

    def __init__(
        self, model: Any, learning: dict[str, torch.nn.Parameter], optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        self.model = model
        self._learning = learning
        self._at_first = {name: p.detach().clone() for name, p in learning.items()}
        self._average = {name: p.detach().clone() for name, p in learning.items()}
        self._num_steps = 0
        self._optimizers = list(optimizers)
        self._rates = [optimizer.param_groups[0]["lr"] for optimizer in self._optimizers]

    @abstractmethod
    def _log_probs(self, lessons: Sequence[Lesson]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the drafter's and the target's log-probs [n, K] of the label tokens, for each depth of the draft."""

    def learn(self, lessons: Sequence[Lesson]) -> float:
        """Take one optimizer step and return the loss before it. A non-finite loss resets to the initial weights."""
        with torch.enable_grad():
            loss = self._loss(lessons)
            loss.backward()  # type: ignore[no-untyped-call]
        self._num_steps += 1
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * min(self._num_steps / _WARM_UP_STEPS, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        value = float(loss.detach())
        if math.isfinite(value):
            self._take_into_the_average()
        else:
            self._start_over()
        return value

    @torch.no_grad()
    def agreement(self, lessons: Sequence[Lesson], *, at_first: bool = False) -> float:
        """Return the mean overlap of both distributions of the next token, sum of min(p, q)."""
        with self._drafting(at_first):
            log_probs, labels = next(self._log_probs(lessons))
        return float(torch.minimum(log_probs.exp(), labels.exp()).sum(-1).mean())

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
        for optimizer in self._optimizers:
            optimizer.state.clear()
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


class Student(LearningCopy):
    """Learning copy of a draft model."""

    def __init__(self, model: Any, *, max_context: int) -> None:
        examine(model, name="drafter", max_context=max_context)
        self._parts = CausalLM(model)
        learning = dict(model.requires_grad_(True).named_parameters())
        super().__init__(model, learning, _optimizers(model, learning.values()))

    def _log_probs(self, lessons: Sequence[Lesson]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        device = next(self.model.parameters()).device
        width = max(len(lesson.tokens) for lesson in lessons) - 1
        tokens = np.zeros((len(lessons), width), np.int64)  # padding after a lesson is seen by none of its tokens
        places: list[np.ndarray[Any, Any]] = []
        for index, lesson in enumerate(lessons):
            length = len(lesson.tokens) - 1  # the last token predicts nothing
            tokens[index, :length] = lesson.tokens[:-1]
            places.append(index * width + np.arange(length - lesson.num_labels, length))
        hidden = hidden_of(self._parts.trunk(input_ids=torch.from_numpy(tokens).to(device), use_cache=False))
        rows = hidden.flatten(0, 1)[torch.from_numpy(np.concatenate(places)).to(device)]
        temperatures = np.repeat([lesson.temperature for lesson in lessons], [lesson.num_labels for lesson in lessons])
        logits = self._parts.logits(rows) / torch.from_numpy(temperatures.astype(np.float32)).to(device)[:, None]
        ids = torch.from_numpy(np.concatenate([lesson.label_ids for lesson in lessons]).astype(np.int64)).to(device)
        labels = torch.from_numpy(np.concatenate([lesson.label_log_probs for lesson in lessons])).float().to(device)
        yield logits.log_softmax(-1).gather(-1, ids), labels


def _optimizers(model: Any, parameters: Iterable[torch.nn.Parameter]) -> Iterator[torch.optim.Optimizer]:
    """Yield Muon for matrices between hidden states, and AdamW for everything else."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    vocabulary = {id(getattr(end, "weight", None)) for end in ends}
    kinds: tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]] = ([], [])
    for parameter in parameters:
        kinds[parameter.ndim == 2 and id(parameter) not in vocabulary].append(parameter)
    others, matrices = kinds
    if matrices:
        yield Muon(matrices, MUON_RATE)
    if others:
        yield torch.optim.AdamW(others, lr=ADAM_RATE, weight_decay=0.0)

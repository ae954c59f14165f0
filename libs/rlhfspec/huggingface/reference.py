"""The right answers to probes: plain Hugging Face in eager mode, before anything of the model is exchanged.

Asked twice: a second time with every product moved as rounding moves it. What that does to the logits says how far a
right answer may be from another, in this very model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rlhfspec.errors import UnsupportedModel
from rlhfspec.huggingface.attention import AttentionSpec, attending
from rlhfspec.huggingface.causal_lm import Anatomy
from rlhfspec.huggingface.guard import WeightProducts
from rlhfspec.huggingface.past import past_of
from rlhfspec.huggingface.probes import Probe, random_past
from rlhfspec.huggingface.trace import FORWARD_ERRORS, first_line

# Of logits, in parts of the largest one: so far two right answers may be from each other in any model.
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 2e-2}
_NAME = "rlhfspec_reference"
_NEAR_TIE = 0.05  # between the scores of two experts, in parts of the larger
_LAST_BIT = 2.0**-23  # of a product's usual size: what adding up in another order does to it
_FACTOR = 4  # times what rounding was seen to do; the engine's own rounding does .6 to 2 times that


class Rounding(WeightProducts):
    """How the engine's numbers are rounded, for a reference that rounds at the same places.

    Weights and cached keys and values are kept as `dtype`; some arithmetics read activations as bfloat16.
    """

    def __init__(self, model: Any, *, dtype: torch.dtype, arithmetic: str) -> None:
        """The model's parameters hold rounded values already (`round_parameters`)."""
        super().__init__()
        self.dtype = dtype
        self.noise: torch.Generator | None = None  # given: every product is moved by as much as rounding may move it
        self._rounds_rows = arithmetic in ("amx", "dpbf16")
        self.know(model.parameters())

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        product = functional.linear(rounded(rows, torch.bfloat16) if self._rounds_rows else rows, weight)
        if self.noise is None:
            return product
        size = product.square().mean(-1, keepdim=True).sqrt()
        return product + _LAST_BIT * size * torch.randn(product.shape, generator=self.noise, dtype=product.dtype)

    @property
    def is_needed(self) -> bool:
        return self.dtype == torch.bfloat16 or self.noise is not None

    def kept(self, states: Tensor) -> Tensor:
        return rounded(states, torch.bfloat16) if self.dtype == torch.bfloat16 else states


def round_parameters(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """In place, to what `dtype` can hold; returns what they were, by their names, where that is something else."""
    before = {}
    if dtype == torch.bfloat16:
        for name, parameter in model.named_parameters():
            before[name] = parameter.data
            parameter.data = rounded(parameter.data, dtype)
    return before


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The value as `dtype` keeps it, in float32 (float64 where that is what is kept)."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.float64) if dtype == torch.float64 else tensor.to(dtype).to(torch.float32)


_CHOOSING = (torch.topk, Tensor.topk, torch.max, Tensor.max)


class ExpertChoices(TorchFunctionMode):
    """Hears which experts a forward chooses for its rows: what `topk` and `max` return.

    A choice between two that are nearly equal may go either way with rounding, and what follows it is another number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Tensor, Tensor]] = []  # values and indices [rows, k] of every call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _CHOOSING and isinstance(result, tuple) and result[1].ndim == 2:
            self.made.append((result[0].detach().float().cpu(), result[1].detach().cpu()))
        return result


@dataclass(frozen=True, slots=True)
class Answer:
    """What a probe gave."""

    logits: Tensor  # [tokens, vocab]
    choices: list[tuple[Tensor, Tensor]]  # values and indices, [tokens, k] of every mixture of experts

    def num_comparable(self, other: Answer) -> int:
        """How many leading rows chose the same experts in both; where they part, it must have been a near tie."""
        rows = len(self.logits)
        for (values, indices), (their_values, their_indices) in zip(self.choices, other.choices, strict=False):
            if indices.shape != their_indices.shape or len(indices) != len(self.logits):
                continue
            parted = (indices.sort(1).values != their_indices.sort(1).values).any(1).nonzero().flatten().tolist()
            if parted and parted[0] < rows:
                gap = (values[parted[0]] - their_values[parted[0]]).abs().max() / values[parted[0]].abs().max()
                rows = parted[0] if gap < _NEAR_TIE else rows
        return rows


@dataclass(frozen=True, slots=True)
class Reference:
    """What plain Hugging Face answers, and how far rounding alone moves its logits, in parts of the largest one."""

    kind: str  # the model's class
    name: str  # of the model, in messages
    probes: tuple[Probe, ...]
    answers: tuple[Answer, ...]
    noise: float

    def check(self, found: Sequence[Answer], tolerance: float, *, who: str) -> float:
        """The largest difference, in parts of the largest logit. Raises UnsupportedModel where rounding cannot explain
        it. who: whose answers they are."""
        difference, probe = compare(found, self.answers, self.probes)
        if difference > max(tolerance, _FACTOR * self.noise):
            problem = f"{who} logits differ from Hugging Face's by {difference:.1e} of their size on {probe}"
            raise UnsupportedModel(self.name, self.kind, f"{problem}; rounding moves them by {self.noise:.1e}")
        return difference


@torch.inference_mode()
def ask(model: Any, anatomy: Anatomy, probes: Sequence[Probe], *, name: str, rounding: Rounding) -> Reference:
    """name: what messages call the model. Raises UnsupportedModel."""
    answers = tuple(_answer(model, anatomy, probe, name, rounding) for probe in probes)
    rounding.noise = torch.Generator().manual_seed(0)
    moved = [_answer(model, anatomy, probe, name, rounding) for probe in probes]
    noise, _ = compare(moved, answers, probes)
    return Reference(type(model).__name__, name, tuple(probes), answers, noise)


def _answer(model: Any, anatomy: Anatomy, probe: Probe, name: str, rounding: Rounding) -> Answer:
    past = past_of(model, probe.past)
    needs = rounding.is_needed
    function = _Eager(anatomy.attentions, probe.past, rounding).attend if probe.past or needs else None
    attention = attending(model, "eager" if function is None else _NAME, function, masks=function is not None)
    try:
        with attention, ExpertChoices() as choices, rounding if needs else nullcontext():
            logits = model(input_ids=torch.tensor([probe.tokens]), **past).logits
    except FORWARD_ERRORS as error:
        if isinstance(error, UnsupportedModel):
            raise
        problem = f"Hugging Face itself fails on {probe}: {first_line(error)}"
        raise UnsupportedModel(name, type(model).__name__, problem) from error
    return Answer(logits[0].float(), choices.made)


def compare(found: Sequence[Answer], wanted: Sequence[Answer], probes: Sequence[Probe]) -> tuple[float, Probe]:
    """The largest difference, in parts of the largest logit, and the probe that shows it."""
    worst, at = 0.0, probes[0]
    for ours, theirs, probe in zip(found, wanted, probes, strict=True):
        rows = ours.num_comparable(theirs)
        if not rows or not torch.isfinite(theirs.logits).all():
            continue  # broken weights are reported sequence by sequence, when they are used
        difference = (ours.logits - theirs.logits)[:rows].abs().nan_to_num(float("inf"))
        size = float(difference.max()) / max(float(theirs.logits.abs().max()), 1.0)
        if size > worst:
            worst, at = size, probe
    return worst, at


def same_bits(left: Sequence[Answer], right: Sequence[Answer]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a.logits.nan_to_num(), b.logits.nan_to_num()) for a, b in pairs)


class _Eager:
    """The model's own eager attention over a past that is random instead of zero, rounded as the engine keeps it."""

    def __init__(self, specs: tuple[AttentionSpec, ...], past: int, rounding: Rounding) -> None:
        self.coming = iter(specs)
        self.past = past
        self.rounding = rounding

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **keywords: Any
    ) -> Any:
        keys, values = random_past(next(self.coming), self.past)
        key = self.rounding.kept(torch.cat([keys, key[:, :, self.past :]], dim=2))
        value = self.rounding.kept(torch.cat([values, value[:, :, self.past :]], dim=2))
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, attention_mask, **keywords)

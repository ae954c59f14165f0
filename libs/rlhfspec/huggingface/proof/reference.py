"""Reference outputs for probes, from plain Hugging Face with eager attention.

A second run perturbs every product by rounding noise; the change of logits gives the model's tolerance.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from rlhfspec.errors import UnsupportedModel
from rlhfspec.huggingface.fused.casting import Precision, rounded
from rlhfspec.huggingface.fused.guard import WeightProducts
from rlhfspec.huggingface.fused.widened import one_layer_wide
from rlhfspec.huggingface.proof.probes import Probe, Scattered, random_past
from rlhfspec.huggingface.structure.attention import AttentionSpec, attending, visible
from rlhfspec.huggingface.structure.causal_lm import Anatomy
from rlhfspec.huggingface.structure.past import past_of
from rlhfspec.huggingface.structure.trace import refusing

# Least tolerance of logits, relative to the largest.
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 2e-2}
_REFERENCE_NAME = "rlhfspec_reference"
_NEAR_TIE = 0.05  # between two experts' scores, relative to the larger
_FOLLOWED = 0.1  # likewise, for choices that are taken over; bfloat16 flipped some up to .04
_LAST_BIT = 2.0**-23  # of a product's usual size: effect of another order of addition
# times the measured effect of rounding. The engine's own rounding has .6 to 2 times that effect, the trainer's in
# bfloat16 .6 to 2.6; RoPE frequencies in bfloat16 have 2 to 10 times at position 500, 5 to 60 at 4,000.
_FACTOR = 4


class Rounding(WeightProducts):
    """Function mode that rounds weights, cached KV and activations where the verified model does."""

    def __init__(self, precision: Precision, *, arithmetic: str, activations: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.activations = activations  # rounded in the second run only, to measure the tolerance
        self.precision = precision
        self.noise: torch.Generator | None = None  # if set, every product is perturbed by rounding noise
        self._rounds_rows = arithmetic in ("amx", "dpbf16")

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        rounds = self._rounds_rows and self.kept_as(weight) == torch.bfloat16
        return self.moved(functional.linear(rounded(rows, torch.bfloat16) if rounds else rows, weight))

    def moved(self, product: Tensor) -> Tensor:
        """Return a product with the noise of its rounding, if that is measured."""
        if self.noise is None:
            return product
        size = product.square().mean(-1, keepdim=True).sqrt()
        return product + _LAST_BIT * size * torch.randn(product.shape, generator=self.noise, dtype=product.dtype)

    @property
    def is_needed(self) -> bool:
        return self.precision.usual == torch.bfloat16 or self.noise is not None

    @property
    def rounds_activations(self) -> bool:
        return self.activations == torch.bfloat16 and self.noise is not None

    def kept(self, states: Tensor) -> Tensor:
        return rounded(states, torch.bfloat16) if self.precision.usual == torch.bfloat16 else states


_CHOOSING = (torch.topk, Tensor.topk, torch.max, Tensor.max)


class ExpertChoices(TorchFunctionMode):
    """Function mode that records a forward's expert choices, which rounding may flip, from `topk` and `max`."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Tensor, Tensor]] = []  # values and indices [rows, k] of every call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _CHOOSING and isinstance(result, tuple) and result[1].ndim == 2:
            self.made.append((result[0].detach().float().cpu(), result[1].detach().cpu()))
        return result


class FollowedChoices(TorchFunctionMode):
    """Function mode that takes another forward's experts if their scores are close, as bfloat16 flips many choices."""

    def __init__(self, choices: Sequence[Tensor]) -> None:
        super().__init__()
        self._coming = list(choices)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_choice = func in _CHOOSING and isinstance(result, tuple) and bool(self._coming)
        if not is_choice or result[1].shape != self._coming[0].shape:
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        indices = self._coming.pop(0).to(scores.device)
        values = scores.gather(-1, indices)
        size = scores.masked_fill(~scores.isfinite(), 0).abs().amax(-1)
        apart = (result[0].sort(-1).values - values.sort(-1).values).abs().amax(-1)
        is_near = (apart <= _FOLLOWED * size)[:, None]  # never true of NaN and infinity
        return type(result)((values.where(is_near, result[0]), indices.where(is_near, result[1])))


@dataclass(frozen=True, slots=True)
class ProbeResult:
    logits: Tensor  # [tokens, vocab]
    choices: list[tuple[Tensor, Tensor]]  # values and indices, [tokens, k] of every mixture of experts

    @property
    def experts(self) -> list[Tensor]:
        return [indices for _, indices in self.choices if len(indices) == len(self.logits)]

    def num_comparable(self, other: ProbeResult) -> int:
        """Return the number of leading rows to compare, before a near tie makes the chosen experts differ."""
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
    """Hugging Face's outputs for probes, and the relative effect of rounding on its logits."""

    kind: str  # the model's class
    name: str  # of the model, in messages
    probes: tuple[Probe, ...]
    answers: tuple[ProbeResult, ...]
    noise: float

    @property
    def choices(self) -> list[Tensor]:
        return [torch.cat(each) for each in zip(*(answer.experts for answer in self.answers), strict=True)]

    def check(self, found: Sequence[ProbeResult], tolerance: float, *, whose: str) -> float:
        """Return the largest relative logit difference, or raise if it exceeds rounding. `whose`: for the message."""
        difference, probe = compare(found, self.answers, self.probes)
        if difference > max(tolerance, _FACTOR * self.noise):
            problem = f"{whose} logits differ from Hugging Face's by {difference:.1e} of their size on {probe}"
            raise UnsupportedModel(self.name, self.kind, f"{problem}; rounding moves them by {self.noise:.1e}")
        return difference


@torch.inference_mode()
def ask(model: Any, anatomy: Anatomy, probes: Sequence[Probe], *, name: str, rounding: Rounding) -> Reference:
    rounding.know(model.named_parameters(), rounding.precision)
    with one_layer_wide(model, rounding):
        answers = tuple(_answer(model, anatomy, probe, name, rounding, nullcontext()) for probe in probes)
        rounding.noise = torch.Generator().manual_seed(0)
        with _rounded_outputs(model) if rounding.rounds_activations else nullcontext():
            moved = [
                _answer(model, anatomy, probe, name, rounding, _following(answer, rounding))
                for probe, answer in zip(probes, answers, strict=True)
            ]
    rounding.forget()
    noise, _ = compare(moved, answers, probes)
    return Reference(type(model).__name__, name, tuple(probes), answers, noise)


def _following(answer: ProbeResult, rounding: Rounding) -> AbstractContextManager[object]:
    return FollowedChoices(answer.experts) if rounding.rounds_activations else nullcontext()


@contextmanager
def _rounded_outputs(model: Any) -> Iterator[None]:
    def hook(module: Any, args: Any, output: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: rounded(tensor, torch.bfloat16), output)

    handles = [module.register_forward_hook(hook) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _answer(
    model: Any, anatomy: Anatomy, probe: Probe, name: str, rounding: Rounding, following: AbstractContextManager[object]
) -> ProbeResult:
    keywords = past_of(model, probe.past)
    if isinstance(probe, Scattered):
        keywords["position_ids"] = torch.tensor([probe.positions])
    needs = rounding.is_needed
    function = _Eager(anatomy.attentions, probe, rounding).attend if probe.num_random or needs else None
    attention = attending(model, "eager" if function is None else _REFERENCE_NAME, function, masks=function is not None)
    refuses = refusing(name, type(model).__name__, f"Hugging Face itself fails on {probe}")
    with refuses, attention, following, ExpertChoices() as choices, rounding if needs else nullcontext():
        logits = model(input_ids=torch.tensor([probe.tokens]), **keywords).logits
    return ProbeResult(logits[0].float(), choices.made)


def compare(
    found: Sequence[ProbeResult], wanted: Sequence[ProbeResult], probes: Sequence[Probe]
) -> tuple[float, Probe]:
    worst, at = 0.0, probes[0]
    for ours, theirs, probe in zip(found, wanted, probes, strict=True):
        rows = ours.num_comparable(theirs)
        if not rows or not torch.isfinite(theirs.logits).all():
            continue  # broken weights are reported per sequence, when used
        difference = (ours.logits - theirs.logits)[:rows].abs().nan_to_num(float("inf"))
        size = float(difference.max()) / max(float(theirs.logits.abs().max()), 1.0)
        if size > worst:
            worst, at = size, probe
    return worst, at


def same_bits(left: Sequence[ProbeResult], right: Sequence[ProbeResult]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a.logits.nan_to_num(), b.logits.nan_to_num()) for a, b in pairs)


class _Eager:
    def __init__(self, specs: tuple[AttentionSpec, ...], probe: Probe, rounding: Rounding) -> None:
        self.coming = iter(specs)
        self.probe = probe
        self.rounding = rounding

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **keywords: Any
    ) -> Any:
        spec, first = next(self.coming), self.probe.num_random
        keys, values = random_past(spec, first)
        key = self.rounding.kept(torch.cat([keys, key[:, :, first:]], dim=2))
        value = self.rounding.kept(torch.cat([values, value[:, :, first:]], dim=2))
        if self.rounding.rounds_activations:
            query, key, value = (rounded(states, torch.bfloat16) for states in (query, key, value))
        if isinstance(self.probe, Scattered):  # Hugging Face takes a gap for another sequence
            seen = visible(key.shape[2], spec, query.device)
            attention_mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(query.dtype).min)[None, None]
        eager = sys.modules[type(module).__module__].eager_attention_forward
        out, weights = eager(module, query, key, value, attention_mask, **keywords)
        return self.rounding.moved(out), weights

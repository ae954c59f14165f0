"""Quantised copy of the policy that drafts for it, reading the policy's own KV cache."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhfspec.engine.forward.device import wait_for
from rlhfspec.engine.forward.runner import ModelRunner
from rlhfspec.huggingface.fused.experts import PackedExperts
from rlhfspec.huggingface.structure.causal_lm import anatomy_of
from rlhfspec.kernels import few_bit_linear
from rlhfspec.kernels.few_bit_linear import FewBitLinear
from rlhfspec.kernels.int8 import in_8_bits, requantise
from rlhfspec.kernels.linear import PackedGatedMLP, PackedLinear

log = logging.getLogger(__name__)


class FewBits:
    """Quantised copy of a model's matrices, sharing everything else and the KV cache, with a runner of its own.

    On a CPU they have 8 bits; on a device 4, and the head 8.
    """

    def __init__(self, runner: ModelRunner, *, is_optional: bool) -> None:
        self.is_optional = is_optional  # dropped where start-up costs say that it does not pay
        self.is_stale = False  # the policy's weights have changed since
        self._pairs: list[tuple[Any, Any]] = []  # quantised layer, and the policy's
        self._copies: dict[int, Any] = {}
        self._device = runner.config.device
        self._bits = {} if self._device.type == "cpu" else _bits_of(runner.fused.model, runner.config.dtype)
        self.runner = runner.over_the_same_kv(self._copy(runner.fused.model))

    @property
    def expected_acceptance(self) -> float:
        """Return the acceptance to assume before the copy has drafted."""
        return 0.95 if self._device.type == "cpu" else 0.72

    @torch.inference_mode()
    def requantise(self) -> float:
        """Update the copy after the policy's weights changed, and return the seconds taken."""
        began = time.perf_counter()
        for copied, layer in self._pairs:
            if isinstance(copied, FewBitLinear):
                copied.quantise(_weight_of(layer))
            else:
                requantise(copied, layer)
        if self.runner.native is not None:
            self.runner.native.bind()
        wait_for(self._device)
        seconds = time.perf_counter() - began
        self.is_stale = False
        log.info("quantised the policy for drafting in %.3f s", seconds, extra={"fields": {"seconds": seconds}})
        return seconds

    def _copy(self, module: Any) -> Any:
        if id(module) not in self._copies:
            self._copies[id(module)] = self._quantised(module) or self._shell(module)
        return self._copies[id(module)]

    def _quantised(self, module: Any) -> nn.Module | None:
        copied: nn.Module
        if isinstance(module, PackedLinear | PackedGatedMLP):
            copied = in_8_bits(module)
        elif id(module) in self._bits:
            copied = FewBitLinear(_weight_of(module), module.bias, self._bits[id(module)])
        else:
            return None
        self._pairs.append((copied, module))
        return copied

    def _shell(self, module: nn.Module) -> nn.Module:
        copied = copy.copy(module)
        copied._modules = {name: child and self._copy(child) for name, child in module._modules.items()}
        if isinstance(copied, PackedExperts):
            for name in ("mlps", "ups", "downs"):
                setattr(copied, name, [self._copy(layer) for layer in getattr(module, name)])
        return copied


def bytes_on_a_device(model: Any) -> int:
    """Return the memory of a model's copy on a device, at most."""
    bits = _bits_of(model, None)
    return sum(
        few_bit_linear.num_bytes(_weight_of(module), bits[id(module)])
        for module in model.modules() if id(module) in bits
    )  # fmt: skip


def _bits_of(model: Any, dtype: torch.dtype | None) -> dict[int, int]:
    """Return the bits of each layer that a device quantises, by id; `dtype`: only of weights kept so."""
    head = model.get_output_embeddings()
    return {
        id(module): 8 if module is head else 4
        for module in _linear_layers(model)
        if few_bit_linear.fits(_weight_of(module)) and dtype in (None, _weight_of(module).dtype)
    }


def _linear_layers(model: Any) -> Iterator[nn.Module]:
    called = anatomy_of(model).called  # others only lend their weights
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) in (nn.Linear, Conv1D) and name in called:
            yield module


def _weight_of(layer: Any) -> Tensor:
    """Return the weight [N, K]; GPT-2's linear layer keeps it transposed."""
    return layer.weight.T if type(layer) is Conv1D else layer.weight

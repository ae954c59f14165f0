"""Quantised copy of the policy that drafts for it, reading the policy's own KV cache."""

from __future__ import annotations

import copy
import logging
import time
from typing import Any

import torch
from torch import nn

from rlhfspec.engine.forward.runner import ModelRunner
from rlhfspec.huggingface.fused.experts import PackedExperts
from rlhfspec.huggingface.structure.causal_lm import CausalLM
from rlhfspec.kernels.int8 import in_8_bits, requantise
from rlhfspec.kernels.linear import PackedGatedMLP, PackedLinear

log = logging.getLogger(__name__)


class FewBits:
    """8-bit copy of a model's matrices, sharing everything else and the KV cache, with a runner of its own."""

    def __init__(self, runner: ModelRunner, *, is_optional: bool) -> None:
        self.is_optional = is_optional  # dropped where start-up costs say that it does not pay
        self._pairs: list[tuple[Any, Any]] = []  # quantised layer, and the policy's
        self._copies: dict[int, Any] = {}
        self.runner = copy.copy(runner)
        self.runner.parts = CausalLM(self._copy(runner.fused.model))
        if runner.native is not None:
            self.runner.native = self.runner.native_decoder()

    @torch.inference_mode()
    def requantise(self) -> None:
        """Update the copy after the policy's weights changed."""
        began = time.perf_counter()
        for copied, layer in self._pairs:
            requantise(copied, layer)
        if self.runner.native is not None:
            self.runner.native.bind()
        seconds = time.perf_counter() - began
        log.info("quantised the policy for drafting in %.3f s", seconds, extra={"fields": {"seconds": seconds}})

    def _copy(self, module: Any) -> Any:
        if id(module) not in self._copies:
            self._copies[id(module)] = self._in_8_bits(module) or self._shell(module)
        return self._copies[id(module)]

    def _in_8_bits(self, module: nn.Module) -> nn.Module | None:
        if not isinstance(module, PackedLinear | PackedGatedMLP):
            return None
        copied = in_8_bits(module)
        self._pairs.append((copied, module))
        return copied

    def _shell(self, module: nn.Module) -> nn.Module:
        copied = copy.copy(module)
        copied._modules = {name: child and self._copy(child) for name, child in module._modules.items()}
        if isinstance(copied, PackedExperts):
            for name in ("mlps", "ups", "downs"):
                setattr(copied, name, [self._copy(layer) for layer in getattr(module, name)])
        return copied

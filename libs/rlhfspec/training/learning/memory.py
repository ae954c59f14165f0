"""Memory check of `training.activationCheckpointing: auto`.

Layers are recomputed if activations > 0.9 * (free memory with weights loaded - 3 * trained weights) - 1 GiB.
The 3 covers gradients and Adam's moments, the 1 GiB logits, and the tenth fragmentation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import nn

from rlhfspec import job
from rlhfspec.common.ranks.group import Ranks
from rlhfspec.huggingface.fused.widened import one_layer_wide
from rlhfspec.training.modeling.recomputed import activation_bytes, recompute
from rlhfspec.training.modeling.stored import local_of

log = logging.getLogger("rlhfspec.training.learning")
GIB = 1 << 30


class ActivationRoom:
    """Memory check of a rank's models, created while they are on the host."""

    def __init__(
        self,
        spec: job.Spec,
        trunks: Sequence[nn.Module],
        device: torch.device,
        dtype: torch.dtype,
        *,
        widens: bool = False,
    ) -> None:
        """Estimate activation bytes from two short rows. dtype: compute type. widens: bfloat16 becomes float32."""
        self._setting = spec.training.activation_checkpointing
        self._trunks = trunks
        self._device = device
        self._kept: list[int | None] = []
        if self._setting == "auto" and device.type != "cpu":
            num_tokens = max(spec.training.tokens_per_micro_batch, spec.max_context)
            for trunk in trunks:
                as_it_runs = one_layer_wide(trunk) if widens else nullcontext()
                with as_it_runs, torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                    self._kept.append(activation_bytes(trunk, num_tokens))

    def settle(self, trained: Iterable[torch.Tensor], ranks: Ranks) -> bool:
        """Make all ranks recompute if one needs it, and return the choice. Call this with weights on the device."""
        again = self._setting == "on"
        if self._kept:
            again = not all(ranks.gather(self._fits(sum(local_of(tensor).nbytes for tensor in trained))))
        for trunk in self._trunks if again else ():
            recompute(trunk)
        return again

    def _fits(self, trained: int) -> bool:
        free = torch.get_device_module(self._device).mem_get_info(self._device)[0]
        needed = max((kept for kept in self._kept if kept is not None), default=0)
        room = fits_into(free, trained)
        fits = None not in self._kept and needed <= room
        log.info(
            "a micro-batch has %.2f GiB of activations, and there is room for %.2f GiB: they are %s",
            needed / GIB, room / GIB, "kept" if fits else "recomputed in the backward pass",
        )  # fmt: skip
        return fits


def fits_into(free: int, trained: int) -> int:
    return int(0.9 * (free - 3 * trained)) - GIB

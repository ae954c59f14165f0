"""FSDP2 sharding of weights and optimizer state. A block is gathered while it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.huggingface.fused.widened import widen
from rlhfspec.huggingface.structure.layers import layers_of


def shard(
    module: nn.Module, trunk: Any, device: torch.device, ranks: Ranks, *, computes_in: torch.dtype, widens: bool
) -> None:
    """Shard a host module in place, block by block to limit device memory.

    computes_in: type of gathered blocks on a device. widens: bfloat16 weights become float32.
    """
    if ranks.sharing.num_ranks == 1:
        return
    mesh = _mesh(ranks, device)
    for part in (*layers_of(trunk), module):
        _take(part, device, widens)
        policy = MixedPrecisionPolicy()
        if part is not module and device.type != "cpu" and computes_in != torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=computes_in, reduce_dtype=torch.float32)
        for group in _of_other_types(part):
            fully_shard(group, mesh=mesh)
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for part in module.modules():
        if isinstance(part, FSDPModule):  # loss weights span the mini-batch: gradients add up
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def _mesh(ranks: Ranks, device: torch.device) -> DeviceMesh:
    if ranks.data is None:
        return init_device_mesh(device.type, (ranks.num_ranks,))
    return DeviceMesh.from_group(ranks.data.device, device.type)


def _take(part: nn.Module, device: torch.device, widens: bool) -> None:
    part._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]
    if widens:
        widen(part.parameters(recurse=False))
    for child in part.children():
        if not isinstance(child, FSDPModule):
            _take(child, device, widens)


def _of_other_types(part: nn.Module) -> list[nn.Module]:
    """Return modules to shard separately, inner ones first, because an FSDP gather takes a single dtype."""
    found: list[nn.Module] = []

    def left_in(module: nn.Module) -> torch.dtype | None:
        own = {parameter.dtype for parameter in module.parameters(recurse=False)}
        assert len(own) <= 1, f"parameters of several types in {type(module).__name__}: {own}"
        inner = [(child, left_in(child)) for child in module.children() if not isinstance(child, FSDPModule)]
        types = [dtype for _, dtype in inner if dtype is not None]
        kept = next(iter(own), max(types, key=types.count, default=None))
        found.extend(child for child, dtype in inner if dtype not in (None, kept))
        return kept

    left_in(part)
    return found

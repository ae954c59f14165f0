"""FSDP2: each rank keeps a share of every weight and of its optimizer state; blocks are whole while they run."""

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
    """Leave each rank its share of a module, in place.

    The module comes from the host: a block goes to the device, and is cut there before the next one comes.
    computes_in: on a device a block is gathered in this type, and its gradients are added in float32. widens: weights
    in bfloat16 become float32 on the device.
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
        if isinstance(part, FSDPModule):  # losses are weighted over the whole mini-batch: gradients add up
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def _mesh(ranks: Ranks, device: torch.device) -> DeviceMesh:
    """Return the ranks that share, as torch has them."""
    if ranks.data is None:
        return init_device_mesh(device.type, (ranks.num_ranks,))
    return DeviceMesh.from_group(ranks.data.device, device.type)


def _take(part: nn.Module, device: torch.device, widens: bool) -> None:
    """Move a module to the device, but for what is sharded there already."""
    part._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]
    if widens:
        widen(part.parameters(recurse=False))
    for child in part.children():
        if not isinstance(child, FSDPModule):
            _take(child, device, widens)


def _of_other_types(part: nn.Module) -> list[nn.Module]:
    """Return modules to be sharded by themselves, inner ones first: what is gathered at a time must be of one type.

    Example (a router in float32 among layers in bfloat16):
        >>> router, up, down = nn.Linear(2, 2), nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2).bfloat16()
        >>> _of_other_types(nn.ModuleList([up, router, down])) == [router]
        True
    """
    found: list[nn.Module] = []

    def left_in(module: nn.Module) -> torch.dtype | None:
        """Return the type of what is sharded with the modules around this one."""
        own = {parameter.dtype for parameter in module.parameters(recurse=False)}
        assert len(own) <= 1, f"parameters of several types in {type(module).__name__}: {own}"
        inner = [(child, left_in(child)) for child in module.children() if not isinstance(child, FSDPModule)]
        types = [dtype for _, dtype in inner if dtype is not None]
        kept = next(iter(own), max(types, key=types.count, default=None))
        found.extend(child for child, dtype in inner if dtype not in (None, kept))
        return kept

    left_in(part)
    return found

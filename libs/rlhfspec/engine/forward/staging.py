"""Transfers of a step's small arrays through a pinned buffer: one copy to the device, one back.

>>> staging = Staging(torch.device("cpu"))
>>> given = staging.up({"seeds": np.array([1, 2], np.uint64), "top_p": np.ones(2, np.float32)})
>>> given["seeds"], staging.down([given["top_p"], given["seeds"] > 1])
(tensor([1, 2]), [array([1., 1.], dtype=float32), array([False,  True])])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhfspec.engine.forward.device import module_of

Array = npt.NDArray[Any]
_ALIGNED = 8  # bytes: of the largest type


class Staging:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.empty(0, dtype=torch.uint8)
        self._taken: Any = None  # event: the device has read the buffer

    def up(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        """Copy arrays to the device as tensors; unsigned integers become signed, with equal bits."""
        ends = np.cumsum([-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays.values()]).tolist()
        host = self._room(ends[-1])
        memory = host.numpy()
        for end, array in zip(ends, arrays.values(), strict=True):
            first = end - -(-array.nbytes // _ALIGNED) * _ALIGNED
            memory[first : first + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        there = host.to(self._device, non_blocking=True)
        self._read()
        found = {}
        for (name, array), end in zip(arrays.items(), ends, strict=True):
            first = end - -(-array.nbytes // _ALIGNED) * _ALIGNED
            found[name] = there[first : first + array.nbytes].view(_dtype_of(array)).view(array.shape)
        return found

    def down(self, tensors: Sequence[Tensor]) -> list[Array]:
        """Copy tensors of one shape, boolean or with 4-byte elements, to host arrays."""
        if tensors[0].is_cpu:
            return [tensor.numpy() for tensor in tensors]
        words = [
            tensor.to(torch.int32) if tensor.dtype == torch.bool else tensor.view(torch.int32) for tensor in tensors
        ]
        rows = torch.stack(words).cpu().numpy()
        return [
            row.astype(np.bool_) if tensor.dtype == torch.bool else row.view(_NUMPY[tensor.dtype])
            for row, tensor in zip(rows, tensors, strict=True)
        ]

    def _room(self, num_bytes: int) -> Tensor:
        if self._taken is not None and not self._taken.query():
            self._taken.synchronize()
        if len(self._host) < num_bytes:
            is_pinned = self._device.type == "cuda"
            self._host = torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        return self._host[:num_bytes]

    def _read(self) -> None:
        if self._device.type != "cpu":
            self._taken = self._taken or module_of(self._device).Event()
            self._taken.record()


_NUMPY = {torch.int32: np.int32, torch.float32: np.float32}
_TORCH = {np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32, np.dtype(np.int64): torch.int64}


def _dtype_of(array: Array) -> torch.dtype:
    return torch.int64 if array.dtype == np.uint64 else _TORCH[array.dtype]

"""Weights in an anonymous memory file that the child maps; it vanishes with its last process."""

from __future__ import annotations

import ctypes
import json
import os
import weakref
from collections.abc import Mapping
from typing import Any

_SAFETENSORS_TYPES = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


class WeightsFile:
    """Memory file of the newest weights, kept for restarted children until the next version is complete."""

    def __init__(self) -> None:
        self.path: str | None = None  # None: the model's own
        self._close: Any = None

    def write(self, state_dict: Mapping[str, Any], version: int) -> None:
        """Write weights in the safetensors format, without a file on disk."""
        header, end = dict[str, Any](), 0
        for name, tensor in state_dict.items():
            begin, end = end, end + tensor.numel() * tensor.element_size()
            kind = _SAFETENSORS_TYPES[str(tensor.dtype).removeprefix("torch.")]
            header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        words = json.dumps(header).encode()
        words += b" " * (-len(words) % 8)
        before, descriptor = self._close, os.memfd_create(f"weights-{version}")
        self._close = weakref.finalize(self, os.close, descriptor)
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        with open(descriptor, "wb", closefd=False) as file:
            file.write(len(words).to_bytes(8, "little") + words)
            for tensor in state_dict.values():
                whole = tensor.detach().cpu().contiguous()
                num_bytes = whole.numel() * whole.element_size()
                file.write((ctypes.c_char * num_bytes).from_address(whole.data_ptr()))
        if before is not None:
            before()

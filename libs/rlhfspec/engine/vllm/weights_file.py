"""One version of weights as a file that the child maps: in memory, where there is a folder for that."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_IN_MEMORY = Path("/dev/shm")


class WeightsFile:
    """The newest version stays until the next is there, for a child that is started again."""

    def __init__(self, folder: Path | None = None) -> None:
        place = folder or (_IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None)
        self._folder = tempfile.mkdtemp(prefix="rlhfspec-vllm-", dir=place)
        self.close = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self.path: str | None = None  # None: the model's own

    def write(self, state_dict: Mapping[str, Any], version: int) -> None:
        from safetensors.torch import save_file  # with the trainer's tensors torch is here already

        seen: set[int] = set()
        tensors = {}
        for name, tensor in state_dict.items():
            whole = tensor.detach().cpu().contiguous()
            if whole.data_ptr() in seen:  # a tied weight under its second name, which a file cannot say
                whole = whole.clone()
            seen.add(whole.data_ptr())
            tensors[name] = whole
        before, path = self.path, Path(self._folder) / f"{version}.safetensors"
        save_file(tensors, path)
        self.path = str(path)
        if before is not None:
            Path(before).unlink(missing_ok=True)

"""A second device without a GPU: `load()` gives torch the devices `second:0` and `second:1`.

Its memory is main memory that the host cannot touch: a read by the host raises SIGSEGV. Operators have the CPU's bits.
Tensors of two devices in one operator raise, as on a GPU.

    with second_device.counted() as seen: ...  # then seen.h2d, seen.d2h (copies), seen.waits, seen.names
    with second_device.limited(1 << 20): ...  # a limit in bytes, beyond which it is out of memory

It cannot show missing stream synchronisation (all is in order), pinned memory, Triton kernels or times.
"""

import ctypes
import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from second_device import build, module
from second_device.build import Unavailable

__all__ = ["Unavailable", "counted", "limited", "load", "opened", "swapping", "without_kernels"]
_COUNTS = (
    "h2d", "h2d_bytes", "h2d_pinned", "d2h", "d2h_bytes", "d2d", "waits", "kernels", "allocations", "allocated", "peak",
)  # fmt: skip


@functools.cache
def load() -> None:
    """Load the device for the rest of the process. Raise Unavailable if there is none."""
    torch.ops.load_library(str(build.library()))
    library = _library()
    library.second_count.restype = library.second_limit.restype = ctypes.c_long
    library.second_set_limit.argtypes = [ctypes.c_long]
    library.second_opened.restype = ctypes.c_void_p
    module.register(library)


@functools.cache
def _library() -> Any:
    return ctypes.CDLL(str(build.library()))


def seen() -> SimpleNamespace:
    room = ctypes.create_string_buffer(1 << 16)
    _library().second_names(room, len(room))
    pairs = [line.rsplit(" ", 1) for line in room.value.decode().splitlines()]
    names = dict(sorted(((name, int(times)) for name, times in pairs), key=lambda pair: -pair[1]))
    return SimpleNamespace(**{name: _library().second_count(at) for at, name in enumerate(_COUNTS)}, names=names)


@contextmanager
def counted() -> Iterator[SimpleNamespace]:
    _library().second_forget()
    result = SimpleNamespace()
    yield result
    vars(result).update(vars(seen()))


@contextmanager
def limited(num_bytes: int) -> Iterator[None]:
    """Limit the memory beyond what is allocated. Allocations are rounded to powers of two or mebibytes."""
    gc.collect()
    _library().second_set_limit(seen().allocated + num_bytes)
    try:
        yield
    finally:
        _library().second_set_limit(0)


@contextmanager
def swapping() -> Iterator[None]:
    """Make `Module.to` keep parameters: torch moves them in place for CUDA, for other devices only with this."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Disable the CPU kernels, so that CPU and device run the same twins and give the same bits."""
    from rlhfspec.kernels import gumbel, kv_pack
    from rlhfspec.kernels.cpu import build as kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_load", lambda: (None, "switched off by a test"))
        patch.setattr(gumbel, "_native", lambda *_: None)
        patch.setattr(kv_pack, "_kernel", lambda: None)
        _ask_anew()
        yield
    _ask_anew()


def _ask_anew() -> None:
    names = [name for name in sys.modules if name.startswith("rlhfspec.kernels.") and not name.endswith(".build")]
    for each in (each for name in names for each in vars(sys.modules[name]).values()):
        if hasattr(each, "cache_clear"):
            each.cache_clear()


@functools.cache
def _memory_of(size: int) -> Any:
    return type("Memory", (ctypes.c_char * size,), {})  # one that has attributes


def opened(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach()
    assert flat.is_contiguous()
    size = flat.numel() * flat.element_size()
    if not size:
        return torch.empty(flat.shape, dtype=flat.dtype)
    memory = _memory_of(size).from_address(_library().second_opened(ctypes.c_void_p(flat.data_ptr())))
    memory.held = flat
    return torch.frombuffer(memory, dtype=flat.dtype).reshape(flat.shape)

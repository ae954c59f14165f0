"""Memory and synchronization of the device that models run on."""

from __future__ import annotations

from typing import Any

import torch

from rlhfspec.errors import InvalidRequest

FIELD = "gpu_memory_fraction"


def module_of(device: torch.device) -> Any:
    return torch.get_device_module(device)


def is_measured(device: torch.device) -> bool:
    """Return whether the device reports its total and free memory."""
    return device.type != "cpu" and hasattr(module_of(device), "mem_get_info")


def wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        module_of(device).synchronize(device)


def check_fits(device: torch.device, fraction: float, *, weights: int, kv: int) -> None:
    """Raise InvalidRequest if weights and KV (bytes) do not fit the device."""
    if is_measured(device) and weights + kv > free_bytes(device, fraction):
        parts = (f"weights take {gigabytes(weights)}", f"keys and values take {gigabytes(kv)}")
        raise InvalidRequest(FIELD, fraction, does_not_fit(device, fraction, *parts))


def free_bytes(device: torch.device, fraction: float) -> int:
    module = module_of(device)
    module.empty_cache()
    free, total = module.mem_get_info(device)
    return int(min(free, fraction * total - module.memory_allocated(device)))


def does_not_fit(device: torch.device, fraction: float, *parts: str) -> str:
    module = module_of(device)
    free, total = module.mem_get_info(device)
    may = f"{gigabytes(int(fraction * total))} ({fraction:g} of {device}) may be used and {gigabytes(free)} are free"
    return f"{may}; {', '.join(parts)}, and this process already holds {gigabytes(module.memory_allocated(device))}"


def gigabytes(num_bytes: int) -> str:
    """Format bytes as gigabytes.

    >>> gigabytes(16_060_000_000), gigabytes(250_000)
    ('16.06 GB', '0.00025 GB')
    """
    return f"{num_bytes / 1e9:.4g} GB"

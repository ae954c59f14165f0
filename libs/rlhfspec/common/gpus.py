"""Selection of the GPUs that a process may see."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NODE = re.compile(r"nvidia\d+")


def visible(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, else the indices of `devices`/nvidia*, without initializing CUDA."""
    told = environment.get(VISIBLE)
    if told is not None:
        return [name.strip() for name in told.split(",") if name.strip() not in ("", "-1")]
    count = sum(1 for node in devices.glob("nvidia*") if _NODE.fullmatch(node.name))
    return [str(index) for index in range(count)]


def of_rank(gpus: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return this rank's GPU in a list, or all GPUs if LOCAL_RANK is unset."""
    rank = environment.get("LOCAL_RANK", "")
    return [gpus[int(rank) % len(gpus)]] if rank and gpus else list(gpus)


def see_only(told: str | None, environment: MutableMapping[str, str]) -> None:
    """Set CUDA_VISIBLE_DEVICES to this rank's GPU, or all, of `told` (comma-separated; None: all visible GPUs)."""
    gpus = visible(environment) if told is None else visible({VISIBLE: told})
    mine = of_rank(gpus, environment)
    if told is not None or mine != gpus:
        environment[VISIBLE] = ",".join(mine)
        environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # numbers mean the same in every process

"""Description of the processor that figures were measured on.

Example:
    >>> processor(arithmetic="amx").has_fast_bfloat16, processor(arithmetic="fma").has_fast_bfloat16
    (True, False)
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_TELLING_FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    cpu: str
    features: tuple[str, ...]  # of those that decide which kernels run
    num_cores: int
    system: str
    arithmetic: str  # of the engine's linear layers (docs/law.md)

    @property
    def has_fast_bfloat16(self) -> bool:
        """Return whether bfloat16 multiplies faster than float32; some benchmarks' thresholds depend on it."""
        return self.arithmetic in ("amx", "dpbf16")


def processor(*, arithmetic: str) -> Processor:
    cpu, flags = _cpu()
    return Processor(
        cpu=cpu,
        features=tuple(name for name in _TELLING_FEATURES if name in flags),
        num_cores=len(os.sched_getaffinity(0)),
        system=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        arithmetic=arithmetic,
    )


def _cpu() -> tuple[str, set[str]]:
    path = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    family = f" (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else ""
    return name + family, set((fields.get("flags") or fields.get("Features") or "").split())

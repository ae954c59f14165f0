"""Verdicts of proofs, kept between starts for equal weights, code and machine."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rlhfspec.common import kept
from rlhfspec.huggingface.checksums import checksums
from rlhfspec.huggingface.cutting import cut_of
from rlhfspec.huggingface.devices import name_of
from rlhfspec.huggingface.proof.probes import Probe
from rlhfspec.messages.records.models import ModelReport


@dataclass(frozen=True, slots=True)
class Proved:
    report: ModelReport
    guarded: tuple[str, ...] = ()  # paths of the modules that run inside the guard


def key_of(model: Any, probes: Sequence[Probe], device: torch.device, *parts: object) -> str | None:
    """Return the key of a model's verdict, a hash of weights, code, device and `parts`. None for one rank's part."""
    if cut_of(model) is not None:
        return None
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    types = {(path, f"{type(module).__module__}.{type(module).__qualname__}") for path, module in model.named_modules()}
    described = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    sums = checksums(list(tensors.values()))
    return kept.key_of(
        "proof", described, sums, sorted(types), _source(model), repr(model.config), [repr(each) for each in probes],
        name_of(device), torch.get_num_threads(), *parts,
    )  # fmt: skip


def find(key: str | None) -> Proved | None:
    found = None if key is None else kept.read(key)
    if found is None:
        return None
    report: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in found["report"].items()
    }
    return Proved(ModelReport(**report), tuple(found["guarded"]))


def keep(key: str | None, verdict: Proved) -> None:
    if key is not None:
        kept.write(key, {"report": asdict(verdict.report), "guarded": verdict.guarded})


def _source(model: Any) -> bytes:
    """Return the source of the model's module, because user code may change between runs."""
    try:
        return Path(inspect.getfile(type(model))).read_bytes()
    except (OSError, TypeError):
        return b""

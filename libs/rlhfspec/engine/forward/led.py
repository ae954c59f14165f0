"""Model runner over several ranks. Rank 0 schedules, samples and drafts, and sends commands to the others.

Rank 0 also gathers and scatters the KV of moving sequences, so that a range is on all ranks or on none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum, auto
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhfspec.common.arrays import IntArray
from rlhfspec.common.ranks.group import STOP, Ranks
from rlhfspec.engine.base import Bytes
from rlhfspec.huggingface.cutting import Cut, cut_of
from rlhfspec.kernels.tree_attention import AttentionMeta, IndexArray


class LedCommand(StrEnum):
    FORWARD = auto()
    COPY = auto()
    READ = auto()
    WRITE = auto()
    FINGERPRINT = auto()
    LOAD_WEIGHTS = auto()


class Others:
    def __init__(self, group: Ranks, cut: Cut) -> None:
        self._group = group
        self._cut = cut

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        return self._cut.shapes

    @property
    def num_processes(self) -> int:
        return self._group.num_ranks

    def forward(
        self, tokens: IndexArray, positions: IndexArray, meta: AttentionMeta, logit_rows: IndexArray, graphed: bool
    ) -> None:
        """Start a forward on the other ranks, sending them only the slot table entries that it reads."""
        rows = np.unique(meta.table_rows)
        width = int(np.max(np.asarray(meta.context_lens), initial=0))
        arrays = {
            "tokens": tokens, "positions": positions, "logit_rows": logit_rows, "slots": meta.slots,
            "table_rows": meta.table_rows, "context_lens": meta.context_lens, "extra": meta.extra,
            "rows": rows, "entries": meta.slot_table[rows, :width],
        }  # fmt: skip
        told = {name: _tensor(array) for name, array in arrays.items()}
        self._group.command(LedCommand.FORWARD, shape=meta.slot_table.shape, graphed=graphed, arrays=told)

    def copy(self, source: IntArray, target: IntArray) -> None:
        self._group.command(LedCommand.COPY, source=_tensor(source), target=_tensor(target))

    def read(self, slots: IntArray, out: Bytes, read_own: Callable[[IntArray, Bytes], None]) -> None:
        """Read the KV of slots into `out` [n, bytes per position] in rank order; `read_own` reads rank 0's part."""
        self._group.command(LedCommand.READ, slots=_tensor(slots))
        parts = _parts_of(out, self.num_processes)
        read_own(slots, own := np.empty(parts[0].shape, np.uint8))
        parts[0][...] = own
        for rank in range(1, self.num_processes):
            dist.recv(torch.from_numpy(own), src=rank, group=self._group.host)
            parts[rank][...] = own

    def write(self, slots: IntArray, kv: Bytes, write_own: Callable[[IntArray, Bytes], None]) -> None:
        self._group.command(LedCommand.WRITE, slots=_tensor(slots))
        own, *others = (part.copy() for part in _parts_of(kv, self.num_processes))
        for rank, part in enumerate(others, 1):
            dist.send(torch.from_numpy(part), dst=rank, group=self._group.host)
        write_own(slots, own)

    def fingerprint(self, own: str) -> str:
        self._group.command(LedCommand.FINGERPRINT)
        return hashlib.blake2b(" ".join(self._group.gather(own)).encode(), digest_size=16).hexdigest()

    def load_weights(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._group.command(LedCommand.LOAD_WEIGHTS, names=list(given))
        parts = {}
        for name, tensor in given.items():
            self._group.broadcast(tensor)
            parts[name] = self._cut.part(name, tensor)
        return parts

    def stop(self) -> None:
        with suppress(RuntimeError):  # a dead process needs no command, and the rest end with it
            self._group.command(STOP)


def follow(runner: Any, group: Ranks) -> None:
    """Run rank 0's commands on this rank's `ModelRunner` until stopped. Raise StageStalled if rank 0 is gone."""
    does = _Follower(runner, group)
    table: dict[str, Callable[..., None]] = {
        LedCommand.FORWARD: does.forward,
        LedCommand.COPY: lambda source, target: runner.copy(source.numpy(), target.numpy()),
        LedCommand.READ: does.read,
        LedCommand.WRITE: does.write,
        LedCommand.FINGERPRINT: does.fingerprint,
        LedCommand.LOAD_WEIGHTS: does.load_weights,
    }
    group.obey(table, stage="generator")


class _Follower:
    def __init__(self, runner: Any, group: Ranks) -> None:
        self._runner = runner
        self._group = group
        self._tables: dict[tuple[int, ...], IntArray] = {}  # graphs belong to a table's shape

    def forward(self, shape: tuple[int, ...], graphed: bool, arrays: dict[str, Tensor]) -> None:
        told = {name: tensor.numpy() for name, tensor in arrays.items()}
        slot_table = self._tables.setdefault(shape, np.zeros(shape, np.int32))
        slot_table[told["rows"], : told["entries"].shape[1]] = told["entries"]
        meta = AttentionMeta(told["slots"], told["table_rows"], told["context_lens"], told["extra"], slot_table)
        self._runner.forward(told["tokens"], told["positions"], meta, told["logit_rows"], graphed=graphed)

    def read(self, slots: Tensor) -> None:
        self._runner.read(slots.numpy(), part := self._part_of(slots))
        dist.send(torch.from_numpy(part), dst=0, group=self._group.host)

    def write(self, slots: Tensor) -> None:
        dist.recv(torch.from_numpy(part := self._part_of(slots)), src=0, group=self._group.host)
        self._runner.write(slots.numpy(), part)

    def fingerprint(self) -> None:
        self._group.gather(self._runner.fingerprint())

    def _part_of(self, slots: Tensor) -> Bytes:
        return np.empty((len(slots), self._runner.bytes_per_position), np.uint8)

    def load_weights(self, names: list[str]) -> None:
        cut = cut_of(self._runner.fused.model)
        assert cut is not None, "a whole model has no others"
        self._runner.load_weights({name: cut.part(name, self._group.broadcast()).clone() for name in names})


def _parts_of(kv: Bytes, num_processes: int) -> Bytes:
    """Return a view by rank of KV [n, bytes per position]: [ranks, n, bytes per position in one rank]."""
    parts: Bytes = kv.reshape(len(kv), num_processes, -1).swapaxes(0, 1)
    return parts


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array))

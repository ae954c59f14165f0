"""One runner in several processes: rank 0 decides and tells, the others run what they are told.

Rank 0 alone has a scheduler, samples and drafts. Before whatever its runner does with the model or its KV it says it to
the others, with all that goes in; they do the same with their part. Nothing that is decided is decided twice.

KV that leaves is gathered by rank 0, and what comes is shared out by it, between two steps: the others have nothing
to do then. So a range is there in all parts or in none, under one checksum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhfspec.common.arrays import IntArray
from rlhfspec.engine.base import Bytes
from rlhfspec.errors import StageStalled
from rlhfspec.huggingface.cutting import Cut, Group, cut_of
from rlhfspec.huggingface.fused.fuse import FusedModel
from rlhfspec.kernels.tree_attention import AttentionMeta, IndexArray

_STOP = "stop"


class LedRunner(Protocol):
    """What a runner does for another process's."""

    fused: FusedModel

    @property
    def bytes_per_position(self) -> int: ...

    def forward(
        self,
        tokens: IndexArray,
        positions: IndexArray,
        meta: AttentionMeta,
        logit_rows: IndexArray,
        *,
        graphed: bool = True,
    ) -> Tensor: ...

    def copy(self, source: IntArray, target: IntArray) -> None: ...

    def read(self, slots: IntArray, out: Bytes) -> None: ...

    def write(self, slots: IntArray, kv: Bytes) -> None: ...

    def fingerprint(self) -> str: ...

    def load_weights(self, state_dict: dict[str, Tensor]) -> None: ...


class Others:
    """The other processes, as rank 0's runner sees them."""

    def __init__(self, group: Group, cut: Cut) -> None:
        self._group = group
        self._cut = cut

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Of the weights of the whole model."""
        return self._cut.shapes

    @property
    def num_processes(self) -> int:
        """With this one."""
        return self._group.num_ranks

    def forward(
        self, tokens: IndexArray, positions: IndexArray, meta: AttentionMeta, logit_rows: IndexArray, graphed: bool
    ) -> None:
        """Numpy goes to them. Of the slot table they get what this forward reads."""
        rows = np.unique(meta.table_rows)
        width = int(np.max(np.asarray(meta.context_lens), initial=0))
        told = (meta.slots, meta.table_rows, meta.context_lens, meta.extra)
        table = (meta.slot_table.shape, rows, meta.slot_table[rows, :width])
        self._tell("forward", tokens, positions, told, table, logit_rows, graphed)

    def copy(self, source: IntArray, target: IntArray) -> None:
        self._tell("copy", source, target)

    def read(self, slots: IntArray, out: Bytes, read_own: Callable[[IntArray, Bytes], None]) -> None:
        """KV of these slots into `out` [n, bytes a position of all], of every position the processes' parts by rank."""
        self._tell("read", slots)
        parts = _parts_of(out, self.num_processes)
        read_own(slots, own := np.empty(parts[0].shape, np.uint8))
        parts[0][...] = own
        for rank in range(1, self.num_processes):
            dist.recv(torch.from_numpy(own), src=rank, group=self._group.host)
            parts[rank][...] = own

    def write(self, slots: IntArray, kv: Bytes, write_own: Callable[[IntArray, Bytes], None]) -> None:
        """The other way round. They write while this one does."""
        self._tell("write", slots)
        own, *others = (part.copy() for part in _parts_of(kv, self.num_processes))
        for rank, part in enumerate(others, 1):
            dist.send(torch.from_numpy(part), dst=rank, group=self._group.host)
        write_own(slots, own)

    def fingerprint(self, own: str) -> str:
        """Of the parts of all."""
        self._tell("fingerprint")
        found: list[Any] = [None] * self.num_processes
        dist.gather_object(own, found, group=self._group.host)
        return hashlib.blake2b(" ".join(found).encode(), digest_size=16).hexdigest()

    def load_weights(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Send whole weights, one by one; return this process's parts."""
        self._tell("load_weights", [(name, tensor.shape, tensor.dtype) for name, tensor in given.items()])
        parts = {}
        for name, tensor in given.items():
            _broadcast(tensor.detach().cpu().contiguous(), self._group)
            parts[name] = self._cut.part(name, tensor)
        return parts

    def stop(self) -> None:
        with suppress(RuntimeError):  # one that is gone needs no word, and the rest end with it
            self._tell(_STOP)

    def _tell(self, name: str, *arguments: Any) -> None:
        dist.broadcast_object_list([(name, arguments)], src=0, group=self._group.commands)


def least_of_all(count: int, group: Group) -> int:
    """The least of what the processes say."""
    least = torch.tensor(count)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group.host)
    return int(least)


def follow(runner: LedRunner, group: Group) -> None:
    """Ranks other than 0: run what rank 0 says until it says stop. StageStalled when it is gone."""
    assert group.rank > 0, "rank 0 leads"
    follower = _Follower(runner, group)
    while True:
        name, arguments = _next_command(group)
        if name == _STOP:
            return
        getattr(follower, name)(*arguments)


class _Follower:
    """Does what the methods of `Others` of the same name say."""

    def __init__(self, runner: LedRunner, group: Group) -> None:
        self._runner = runner
        self._group = group
        self._tables: dict[tuple[int, ...], IntArray] = {}  # graphs belong to a table's shape

    def forward(
        self, tokens: IntArray, positions: IntArray, told: Any, table: Any, logit_rows: IntArray, graphed: bool
    ) -> None:
        shape, rows, entries = table
        slot_table = self._tables.setdefault(shape, np.zeros(shape, np.int32))
        slot_table[rows, : entries.shape[1]] = entries
        slots, table_rows, context_lens, extra = told
        meta = AttentionMeta(slots, table_rows, context_lens, extra, slot_table)
        self._runner.forward(tokens, positions, meta, logit_rows, graphed=graphed)

    def copy(self, source: IntArray, target: IntArray) -> None:
        self._runner.copy(source, target)

    def read(self, slots: IntArray) -> None:
        self._runner.read(slots, part := self._part_of(slots))
        dist.send(torch.from_numpy(part), dst=0, group=self._group.host)

    def write(self, slots: IntArray) -> None:
        dist.recv(torch.from_numpy(part := self._part_of(slots)), src=0, group=self._group.host)
        self._runner.write(slots, part)

    def fingerprint(self) -> None:
        dist.gather_object(self._runner.fingerprint(), group=self._group.host)

    def _part_of(self, slots: IntArray) -> Bytes:
        return np.empty((len(slots), self._runner.bytes_per_position), np.uint8)

    def load_weights(self, told: list[tuple[str, torch.Size, torch.dtype]]) -> None:
        self._runner.load_weights(dict(self._received(told)))

    def _received(self, told: list[tuple[str, torch.Size, torch.dtype]]) -> Iterator[tuple[str, Tensor]]:
        cut = cut_of(self._runner.fused.model)
        assert cut is not None, "a whole model has no others"
        for name, shape, dtype in told:
            yield name, cut.part(name, _broadcast(torch.empty(shape, dtype=dtype), self._group)).clone()


def _parts_of(kv: Bytes, num_processes: int) -> Bytes:
    """A view of KV [n, bytes a position of all], by rank: [processes, n, bytes a position of one]."""
    parts: Bytes = kv.reshape(len(kv), num_processes, -1).swapaxes(0, 1)
    return parts


def _broadcast(tensor: Tensor, group: Group) -> Tensor:
    """By its bytes: gloo does not know every type."""
    dist.broadcast(tensor.view(-1).view(torch.uint8), src=0, group=group.host)
    return tensor


def _next_command(group: Group) -> tuple[str, tuple[Any, ...]]:
    said: list[Any] = [None]
    try:
        dist.broadcast_object_list(said, src=0, group=group.commands)
    except RuntimeError as error:
        raise StageStalled("generator", group.rank, "a command of rank 0", 0.0, f"rank 0 is gone: {error}") from error
    command: tuple[str, tuple[Any, ...]] = said[0]
    return command

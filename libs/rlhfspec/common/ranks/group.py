"""Ranks that work as one process: what they exchange, and how rank 0 commands the others.

Example:
    >>> import torch
    >>> ranks = Ranks()
    >>> ranks.num_ranks, ranks.add(torch.tensor([1.0])).tolist(), ranks.gather("mine")
    (1, [1.0], ['mine'])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlhfspec.common.ranks import codec
from rlhfspec.errors import StageStalled

STOP = "stop"  # the command that ends `obey`


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The place of this process among the ranks. Every rank has to take part in an exchange."""

    rank: int = 0
    num_ranks: int = 1
    silence_seconds: float = 0.0  # how long rank 0 may send no command
    commands: Any = None  # the process group for commands, for its longer patience
    host: Any = None  # the process group for messages and tensors of the host, which that of a GPU refuses
    device: Any = None  # the process group for tensors of the device; None: that of all processes
    tensor: Ranks | None = None  # the ranks that hold parts of one layer, and run the same micro-batches
    data: Ranks | None = None  # the ranks with the same part of it, which share it by FSDP2, and the micro-batches

    @property
    def sharing(self) -> Ranks:
        """Return the ranks that share weights and micro-batches: all, where no layer is cut."""
        return self.data or self

    @property
    def has_the_whole_layer(self) -> bool:
        """Return whether this rank keeps what ranks of one layer have alike."""
        return self.tensor is None or self.tensor.rank == 0

    def mine(self, micro_batches: list[list[int]]) -> list[list[int]]:
        """Return this rank's share of micro-batches whose number is a multiple of the ranks that share."""
        return micro_batches[self.sharing.rank :: self.sharing.num_ranks]

    def add(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks that share."""
        if self.sharing.num_ranks > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor, group=self.sharing.host)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, by rank: what JSON can say."""
        return [value] if self.num_ranks == 1 else codec.gather(value, self.host, self.num_ranks)

    def gather_of_micro_batches(self, value: Any) -> list[Any]:
        """Return the value of every rank that shares, in order: ranks of one layer have the same."""
        return self.gather(value)[:: self.tensor.num_ranks if self.tensor else 1]

    def broadcast(self, value: Any = None, *, source: int = 0) -> Any:
        """Return the value of rank `source`: what JSON can say, and tensors, which are on the host of the others."""
        if self.num_ranks == 1 or self.rank == source:
            if self.num_ranks > 1:
                codec.send(value, self.host, source)
            return value
        return codec.receive(self.host, source)

    def command(self, name: str, **arguments: Any) -> None:
        """Have the other ranks run a command of the table with which they `obey`."""
        if self.num_ranks > 1:
            codec.send([str(name), arguments], self.commands, 0)

    def obey(self, table: Mapping[str, Callable[..., None]], *, stage: str) -> None:
        """Run the commands of rank 0 until it says stop. StageStalled when it says nothing for too long."""
        assert self.rank > 0, "rank 0 leads"
        while True:
            try:
                name, arguments = codec.receive(self.commands, 0)
            except RuntimeError as error:
                patience = self.silence_seconds
                problem = f"waited for a command of rank 0, which is gone or said nothing for {patience:g} s: {error}"
                raise StageStalled(stage, self.rank, "a command of rank 0", patience, problem) from error
            if name == STOP:
                return
            table[name](**arguments)

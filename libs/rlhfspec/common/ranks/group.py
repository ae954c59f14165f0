"""Ranks that work as one process: their exchanges, and the commands of rank 0."""

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
    """Rank of this process and its process groups; every rank must take part in each exchange."""

    rank: int = 0
    num_ranks: int = 1
    silence_seconds: float = 0.0  # longest wait for rank 0's next command
    commands: Any = None  # process group for commands, with a longer timeout
    host: Any = None  # process group for messages and host tensors, which a GPU's group refuses
    device: Any = None  # process group for device tensors; None: that of all processes
    tensor: Ranks | None = None  # ranks that hold parts of one layer, and run the same micro-batches
    data: Ranks | None = None  # ranks with the same part, which share it by FSDP2, and the micro-batches

    @property
    def sharing(self) -> Ranks:
        """Return the ranks that divide micro-batches: all, or the FSDP2 group of this rank under tensor parallelism."""
        return self.data or self

    @property
    def has_the_whole_layer(self) -> bool:
        """Return whether this rank is its tensor-parallel group's first, which keeps the state that all share."""
        return self.tensor is None or self.tensor.rank == 0

    def mine(self, micro_batches: list[list[int]]) -> list[list[int]]:
        return micro_batches[self.sharing.rank :: self.sharing.num_ranks]

    def add(self, tensor: Tensor) -> Tensor:
        if self.sharing.num_ranks > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor, group=self.sharing.host)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        return [value] if self.num_ranks == 1 else codec.gather(value, self.host, self.num_ranks)

    def gather_of_micro_batches(self, value: Any) -> list[Any]:
        """Gather one value for each tensor-parallel group, whose ranks run the same micro-batches, in rank order."""
        return self.gather(value)[:: self.tensor.num_ranks if self.tensor else 1]

    def broadcast(self, value: Any = None, *, source: int = 0) -> Any:
        """Return the value of rank `source` on every rank; received tensors are on the host."""
        if self.num_ranks == 1 or self.rank == source:
            if self.num_ranks > 1:
                codec.send(value, self.host, source)
            return value
        return codec.receive(self.host, source)

    def command(self, name: str, **arguments: Any) -> None:
        if self.num_ranks > 1:
            codec.send([str(name), arguments], self.commands, 0)

    def obey(self, table: Mapping[str, Callable[..., None]], *, stage: str) -> None:
        """Run rank 0's commands, functions of `table`, until STOP; raise StageStalled if none comes for too long."""
        assert self.rank > 0, "rank 0 leads"
        while True:
            try:
                name, arguments = codec.receive(self.commands, 0)
            except RuntimeError as error:
                patience = self.silence_seconds
                problem = f"waited for a command of rank 0, which exited or sent nothing for {patience:g} s: {error}"
                raise StageStalled(stage, self.rank, "a command of rank 0", patience, problem) from error
            if name == STOP:
                return
            table[name](**arguments)

"""Several ranks train as one: the same rollouts everywhere, micro-batches and weights shared out by rule.

Launched by torchrun, rank 0 runs the job and the others follow its commands; alone, nothing of this costs anything.
Every wait has a deadline, and says what it waited for.

Example:
    >>> import torch
    >>> ranks = Ranks()
    >>> ranks.num_ranks, ranks.add(torch.tensor([1.0])).tolist(), ranks.gathered("mine")
    (1, [1.0], ['mine'])
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlhfspec.common.ranks import RankTold, rank_told
from rlhfspec.errors import StageStalled, StorageError
from rlhfspec.huggingface.fused.widened import widen
from rlhfspec.huggingface.structure.layers import layers_of
from rlhfspec.training.learning.rollouts import Rollouts

T = TypeVar("T")
_TELL_SECONDS = 10.0
log = logging.getLogger("rlhfspec.training.learning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Which of how many this process is. What the ranks do together, all have to call."""

    rank: int = 0
    num_ranks: int = 1
    silence_seconds: float = 0.0  # how long rank 0 may say nothing
    commands: Any = None  # the process group that commands travel in, for its longer patience
    host: Any = None  # the one for objects and for tensors of the host: that of a GPU takes neither
    device: Any = None  # the one for tensors of the device; None: that of all processes
    tensor: Ranks | None = None  # those that hold parts of one layer, and run the same micro-batches
    data: Ranks | None = None  # those with the same part of it, who share it by FSDP2, and the micro-batches

    @property
    def sharing(self) -> Ranks:
        """Those that share weights and micro-batches: all, where no layer is cut."""
        return self.data or self

    @property
    def has_the_whole_layer(self) -> bool:
        """Whether it is this rank's to keep what ranks of one layer have alike."""
        return self.tensor is None or self.tensor.rank == 0

    def mine(self, micro_batches: list[list[int]]) -> list[list[int]]:
        """This rank's share of micro-batches whose number is a multiple of those that share."""
        return micro_batches[self.sharing.rank :: self.sharing.num_ranks]

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over those that share."""
        if self.sharing.num_ranks > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor, group=self.sharing.host)
        return tensor

    def gathered_of_micro_batches(self, thing: Any) -> list[Any]:
        """Of each that shares, in order: ranks of one layer have said the same."""
        return self.gathered(thing)[:: self.tensor.num_ranks if self.tensor else 1]

    def gathered(self, thing: Any) -> list[Any]:
        """Everybody's, by rank."""
        things = [thing]
        if self.num_ranks > 1:
            things = [None] * self.num_ranks
            dist.all_gather_object(things, thing, group=self.host)
        return things

    def told_by(self, rank: int, thing: T) -> T:
        """What one rank has, on all: dictionaries, whose tensors travel one by one as they are, and small things."""
        if self.num_ranks == 1:
            return thing
        tensors: list[Tensor] = []

        def head(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor.to("meta")

        said: list[Any] = [_mapped(thing, head)]
        dist.broadcast_object_list(said, src=rank, group=self.host)
        if self.rank != rank:
            return _mapped(said[0], lambda like: self._broadcast(torch.empty_like(like, device="cpu"), rank))  # type: ignore[no-any-return]
        for tensor in tensors:
            self._broadcast(tensor, rank)
        return thing

    def _broadcast(self, tensor: Tensor, rank: int) -> Tensor:
        """By its bytes: gloo does not know every type."""
        sent = tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
        dist.broadcast(sent, src=rank, group=self.host)
        return sent.view(tensor.dtype).reshape(tensor.shape)

    def _mesh(self, device: torch.device) -> DeviceMesh:
        """Of those that share."""
        if self.data is None:
            return init_device_mesh(device.type, (self.num_ranks,))
        return DeviceMesh.from_group(self.data.device, device.type)

    def shard(
        self,
        module: nn.Module,
        trunk: Any,
        device: torch.device,
        computes_in: torch.dtype = torch.float32,
        *,
        widens: bool = False,
    ) -> None:
        """FSDP2: each rank keeps a share of every weight and of its optimizer state; blocks are whole when they run.

        The module comes from the host: a block goes to the device, and is cut there before the next one comes.
        computes_in: on a device a block is gathered in this type, and its gradients are added in float32. widens: what
        is in bfloat16, as it was stored, becomes float32 there.
        """
        if self.sharing.num_ranks == 1:
            return
        mesh = self._mesh(device)
        for part in (*layers_of(trunk), module):
            _take(part, device, widens)
            policy = MixedPrecisionPolicy()
            if part is not module and device.type != "cpu" and computes_in != torch.float32:
                policy = MixedPrecisionPolicy(param_dtype=computes_in, reduce_dtype=torch.float32)
            for group in _of_other_types(part):
                fully_shard(group, mesh=mesh)
            fully_shard(part, mesh=mesh, mp_policy=policy)
        for part in module.modules():
            if isinstance(part, FSDPModule):  # losses are weighted over the whole mini-batch: gradients add up
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)


def _mapped(thing: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """With other tensors, wherever they stand in nested dictionaries.

    >>> _mapped({"step": 2, "of": {"weight": torch.ones(2)}}, torch.neg)
    {'step': 2, 'of': {'weight': tensor([-1., -1.])}}
    """
    if isinstance(thing, Tensor):
        return change(thing)
    return {name: _mapped(each, change) for name, each in thing.items()} if isinstance(thing, dict) else thing


@contextmanager
def joined(
    *,
    timeout_seconds: float,
    silence_seconds: float,
    device: str = "cpu",
    stage: str = "trainer",
    tell_seconds: float = _TELL_SECONDS,
    tensor_parallel: int = 1,
) -> Iterator[Ranks]:
    """The ranks that torchrun started, or this process alone.

    `timeout_seconds` are for one exchange while all work; `silence_seconds` for rank 0 to say something at all: it is
    busy with the other stages for most of a step. device: this rank's own. stage: whose ranks they are.
    tell_seconds: for which all may be missing and nothing is said. tensor_parallel: of so many neighbours each holds a
    part of every layer.
    """
    told = rank_told(os.environ)
    if told.num_ranks == 1:
        yield Ranks()
        return
    _meet(told, timeout_seconds, torch.device(device), stage, tell_seconds)
    try:
        patient, usual = (timedelta(seconds=seconds) for seconds in (silence_seconds, timeout_seconds))
        ranks = Ranks(
            rank=told.rank,
            num_ranks=told.num_ranks,
            silence_seconds=silence_seconds,
            commands=dist.new_group(timeout=patient, backend="gloo"),
            host=dist.new_group(timeout=usual, backend="gloo"),
        )
        if tensor_parallel > 1:
            ranks = _cutting(ranks, tensor_parallel, usual, torch.device(device))
        yield ranks
    finally:
        dist.destroy_process_group()


def _cutting(ranks: Ranks, tensor_parallel: int, timeout: timedelta, device: torch.device) -> Ranks:
    """In rows of so many ranks that cut layers, and columns that share what is cut."""
    rows = torch.arange(ranks.num_ranks).reshape(-1, tensor_parallel)

    def group_of(sets: list[list[int]]) -> Ranks:
        """The one of this rank; all of them make all."""
        found = None
        for members in sets:
            host = dist.new_group(members, timeout=timeout, backend="gloo")
            there = host if device.type == "cpu" else dist.new_group(members, timeout=timeout)
            if ranks.rank in members:
                place = members.index(ranks.rank)
                found = Ranks(rank=place, num_ranks=len(members), host=host, device=there)
        assert found is not None
        return found

    return replace(ranks, tensor=group_of(rows.tolist()), data=group_of(rows.T.tolist()))


def _meet(told: RankTold, timeout_seconds: float, device: torch.device, stage: str, tell_seconds: float) -> None:
    """Says so where that takes long: somebody is not there."""
    others = f"the other {told.num_ranks - 1} ranks" if told.rank == 0 else f"rank 0 at {told.leader}"
    telling = threading.Timer(
        tell_seconds, log.warning, ["rank %d of %d waits for %s", told.rank, told.num_ranks, others]
    )
    telling.daemon = True
    telling.start()
    try:
        dist.init_process_group(timeout=timedelta(seconds=timeout_seconds), **_group_of(device))
    except RuntimeError as error:
        problem = f"waited for {others} for {timeout_seconds:g} s: {str(error).splitlines()[0]}"
        raise StageStalled(stage, told.rank, others, timeout_seconds, problem) from error
    finally:
        telling.cancel()


def _group_of(device: torch.device) -> dict[str, Any]:
    """What the ranks' process group is made of; the device is this process's current one from now on.

    >>> _group_of(torch.device("cpu"))
    {'backend': 'gloo'}
    """
    if device.type == "cpu":
        return {"backend": "gloo"}
    module: Any = torch.get_device_module(device)
    if device.index is not None:
        module.set_device(device)
    backends = f"cpu:gloo,{device.type}:{dist.Backend.default_device_backend_map[device.type]}"
    if device.type != "cuda":
        return {"backend": backends}
    return {"backend": backends, "device_id": torch.device("cuda", module.current_device())}


class Follows(Protocol):
    """What ranks do together: the learner's methods that exchange something."""

    def learn(self, rollouts: Rollouts) -> Any: ...
    def policy_state(self) -> dict[str, Tensor]: ...
    def critic_state(self) -> dict[str, Tensor]: ...
    def own_policy(self) -> dict[str, Tensor]: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: dict[str, Any]) -> None: ...
    @property
    def leads(self) -> bool: ...


# Writes what one rank has of a state into files of a folder, and returns what is to be known of them.
Write = Callable[[Path, dict[str, Any], "Ranks", bool], Any]

# Sends what one rank has of the policy to others; the digests of what it sent. RuntimeError when that cannot be.
Send = Callable[[Any, dict[str, Tensor], int], list[str]]


class Leader:
    """The learner on rank 0: calls each method on all ranks. `close` lets the others go. `write`: that of `follow`."""

    def __init__(self, learner: Any, ranks: Ranks, write: Write) -> None:
        self._learner = learner
        self._ranks = ranks
        self._write = write

    def learn(self, rollouts: Rollouts) -> Any:
        self._command("learn", rollouts)
        return self._learner.learn(rollouts)

    def policy_state(self) -> dict[str, Tensor]:
        self._command("policy_state")
        return self._learner.policy_state()  # type: ignore[no-any-return]

    def critic_state(self) -> dict[str, Tensor]:
        self._command("critic_state")
        return self._learner.critic_state()  # type: ignore[no-any-return]

    def state(self) -> dict[str, Any] | Callable[[Path], list[Any]]:
        """Of one rank; several write theirs themselves into the folder that is given."""
        return self._learner.state() if self._ranks.num_ranks == 1 else self._written

    def _written(self, folder: Path) -> list[Any]:
        self._command("write", folder)
        return _written(self._learner, self._ranks, self._write, folder)

    def send(self, send: Send, told: Any) -> list[list[str]]:
        """Each rank its own share of the policy, as it is `told`; digests by rank. RuntimeError when one could not."""
        self._command("send", told)
        return _sent(self._learner, self._ranks, send, told)

    @property
    def num_sharing(self) -> int:
        """How many ranks send a share of the policy's weights each; 1: this one sends them whole, also where ranks hold
        parts of a layer."""
        shared = any(isinstance(tensor, DTensor) for tensor in self._learner.own_policy().values())
        return self._ranks.num_ranks if shared else 1

    def load_state(self, state: dict[str, Any]) -> None:
        self._command("load_state")
        self._learner.load_state(self._ranks.told_by(0, state))

    def on_each(self, work: Callable[[Path, Ranks], None], folder: Path) -> None:
        """Have every rank call a function of a module. StorageError names the first of them that raised one."""
        self._command("work", work, folder)
        _said_by_each(self._ranks, work, folder, self._ranks)

    def close(self) -> None:
        self._command("stop")

    @property
    def version(self) -> int:
        return int(self._learner.version)

    def _command(self, name: str, *arguments: Any) -> None:
        if self._ranks.num_ranks > 1:
            dist.broadcast_object_list([(name, arguments)], src=0, group=self._ranks.commands)


def follow(learner: Follows, ranks: Ranks, write: Write, send: Send | None = None) -> None:
    """Ranks other than 0: do what rank 0 does until it says stop. StageStalled when it says nothing for too long.
    `send`: that of `Leader.send`."""
    assert ranks.rank > 0, "rank 0 leads"
    while True:
        name, arguments = _next_command(ranks)
        if name == "stop":
            return
        if name == "write":
            with suppress(StorageError):  # rank 0 says it
                _written(learner, ranks, write, *arguments)
        elif name == "work":
            with suppress(StorageError):  # likewise
                _said_by_each(ranks, *arguments, ranks)
        elif name == "send":
            assert send is not None, "rank 0 has weights sent"
            with suppress(RuntimeError):  # likewise
                _sent(learner, ranks, send, *arguments)
        else:
            getattr(learner, name)(*arguments if name != "load_state" else (ranks.told_by(0, {}),))


def _written(learner: Follows, ranks: Ranks, write: Write, folder: Path) -> list[Any]:
    """What each rank wrote, by rank."""
    return _said_by_each(ranks, lambda folder: write(folder, learner.state(), ranks, learner.leads), folder)


def _said_by_each(ranks: Ranks, work: Callable[..., Any], folder: Path, *others: Any) -> list[Any]:
    """What it returned on each rank, in order. StorageError on all when one could not."""
    said, problem = None, ""
    try:
        said = work(folder, *others)
    except (OSError, StorageError) as error:
        why = error.problem if isinstance(error, StorageError) and error.place == str(folder) else str(error)
        problem = f"rank {ranks.rank}: {why}" if ranks.num_ranks > 1 else why
    told = ranks.gathered((said, problem))
    for _, why in told:
        if why:
            raise StorageError(folder, why)
    return [said for said, _ in told]


def _sent(learner: Follows, ranks: Ranks, send: Send, told: Any) -> list[list[str]]:
    digests: list[str] = []
    problem = ""
    try:
        digests = send(told, learner.own_policy(), ranks.rank)
    except RuntimeError as error:
        problem = f"rank {ranks.rank}: {error}"
    found = ranks.gathered((digests, problem))
    for _, why in found:
        if why:
            raise RuntimeError(why)
    return [digests for digests, _ in found]


def _next_command(ranks: Ranks) -> tuple[str, tuple[Any, ...]]:
    said: list[Any] = [None]
    try:
        dist.broadcast_object_list(said, src=0, group=ranks.commands)
    except RuntimeError as error:
        patience = ranks.silence_seconds
        problem = f"waited for a command of rank 0, which is gone or said nothing for {patience:g} s: {error}"
        raise StageStalled("trainer", ranks.rank, "a command of rank 0", patience, problem) from error
    command: tuple[str, tuple[Any, ...]] = said[0]
    return command


def _take(part: nn.Module, device: torch.device, widens: bool) -> None:
    """To the device, but for what is cut there already."""
    part._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]
    if widens:
        widen(part.parameters(recurse=False))
    for child in part.children():
        if not isinstance(child, FSDPModule):
            _take(child, device, widens)


def _of_other_types(part: nn.Module) -> list[nn.Module]:
    """Modules to be sharded by themselves, inner ones first: what is gathered at a time must be of one type.

    Example (a router in float32 among layers in bfloat16):
        >>> router, up, down = nn.Linear(2, 2), nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2).bfloat16()
        >>> _of_other_types(nn.ModuleList([up, router, down])) == [router]
        True
    """
    found: list[nn.Module] = []

    def left_in(module: nn.Module) -> torch.dtype | None:
        """The type of what is sharded with the modules around this one."""
        own = {parameter.dtype for parameter in module.parameters(recurse=False)}
        assert len(own) <= 1, f"parameters of several types in {type(module).__name__}: {own}"
        inner = [(child, left_in(child)) for child in module.children() if not isinstance(child, FSDPModule)]
        types = [dtype for _, dtype in inner if dtype is not None]
        kept = next(iter(own), max(types, key=types.count, default=None))
        found.extend(child for child, dtype in inner if dtype not in (None, kept))
        return kept

    left_in(part)
    return found

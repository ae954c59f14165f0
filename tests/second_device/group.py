"""torch.distributed for the second device: a backend over gloo on the opened memory.

second_device.load(); second_device.group.register(); dist.init_process_group("cpu:gloo,second:second")
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import second_device


class SecondGroup(dist.ProcessGroup):
    """Process group that also takes CPU tensors, as torch uses it for the whole group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._num_ranks, self._rank = size, rank
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("second", store), rank, size, timeout)

    def getBackendName(self) -> str:
        return "second"

    def size(self) -> int:
        return self._num_ranks

    def rank(self) -> int:
        return self._rank

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    group_name = pg_name

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        options = dist.AllreduceOptions() if opts is None else opts
        return _done(self._gloo.allreduce([_host(tensor) for tensor in tensors], options), tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        return _done(self._gloo.broadcast([_host(tensor) for tensor in tensors], opts), tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        return _done(self._gloo.allgather([[_host(each) for each in outputs[0]]], [_host(inputs[0])]), outputs)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        parts = list(_host(output).view(-1).chunk(self._num_ranks))
        return _done(self._gloo.allgather([parts], [_host(given.contiguous()).view(-1)]), output)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any) -> Any:
        whole = _host(given.contiguous()).view(-1).clone()
        reduce = dist.AllreduceOptions()
        is_mean = opts.reduceOp == dist.ReduceOp.AVG
        reduce.reduceOp = dist.ReduceOp.SUM if is_mean else opts.reduceOp
        self._gloo.allreduce([whole], reduce).wait()
        mine = whole.chunk(self._num_ranks)[self._rank]
        _host(output).view(-1).copy_(mine / self._num_ranks if is_mean else mine)
        return _done(self._gloo.barrier(), output)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # their names since torch 2.13

    def barrier(self, opts: Any = None) -> Any:
        return _done(self._gloo.barrier())


def _host(tensor: Tensor) -> Tensor:
    return second_device.opened(tensor) if tensor.device.type == "second" else tensor


def _done(work: Any, result: Any = None) -> Any:
    work.wait()
    future: Any = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


# DTensor speaks to groups through operators of its own.
def _named(name: str) -> Any:
    return dist.distributed_c10d._resolve_process_group(name)


def _all_gather(given: Tensor, size: int, name: str) -> Tensor:
    result = given.new_empty((given.shape[0] * size, *given.shape[1:]))
    _named(name)._allgather_base(result, given)
    return result


def _all_reduce(given: Tensor, reduce: str, name: str) -> Tensor:
    result, options = given.clone(), dist.AllreduceOptions()
    options.reduceOp = getattr(dist.ReduceOp, "SUM" if reduce == "avg" else reduce.upper())
    _named(name).allreduce([result], options)
    return result / _named(name).size() if reduce == "avg" else result


def _reduce_scatter(given: Tensor, reduce: str, size: int, name: str) -> Tensor:
    result, options = given.new_empty((given.shape[0] // size, *given.shape[1:])), dist.ReduceScatterOptions()
    options.reduceOp = getattr(dist.ReduceOp, reduce.upper())
    _named(name)._reduce_scatter_base(result, given, options)
    return result


def _broadcast(given: Tensor, src: int, name: str) -> Tensor:
    result, options = given.clone(), dist.BroadcastOptions()
    options.rootRank = src
    _named(name).broadcast([result], options)
    return result


def _wait(given: Tensor) -> Tensor:
    return given


@functools.cache
def register() -> torch.library.Library:
    dist.Backend.register_backend("second", SecondGroup, devices=["second"])
    library = torch.library.Library("_c10d_functional", "IMPL")
    functions = {
        "all_gather_into_tensor": _all_gather, "all_reduce": _all_reduce, "reduce_scatter_tensor": _reduce_scatter,
        "broadcast": _broadcast, "wait_tensor": _wait,
    }  # fmt: skip
    for name, function in functions.items():
        library.impl(name, function, "PrivateUse1")
    return library

"""Messages between ranks: JSON and tensors, so that receiving one runs no code.

    [length of the JSON, length of the first part] | the JSON and all small tensors | each large tensor

>>> encoded({"step": 2, "betas": (0.9, 0.99), "weight": torch.ones(2)})[0]
b'{"step": 2, "betas": {"$tuple": [0.9, 0.99]}, "weight": {"$tensor": ["float32", [2]]}}'
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_LARGE_BYTES = 1 << 20  # a larger tensor is sent by itself, without a copy
_TENSOR_DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64"),
        *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"),
    )
}


def encoded(value: Any) -> tuple[bytes, list[Tensor]]:
    """Return a value as JSON with tensor placeholders, and the tensors in their order."""
    tensors: list[Tensor] = []

    def plain(each: Any) -> Any:
        if isinstance(each, Tensor):
            tensors.append(each)
            return {"$tensor": [str(each.dtype).removeprefix("torch."), list(each.shape)]}
        if isinstance(each, tuple):
            return {"$tuple": [plain(item) for item in each]}
        if isinstance(each, list):
            return [plain(item) for item in each]
        if isinstance(each, dict):
            assert all(isinstance(key, str) and not key.startswith("$") for key in each), f"keys: {list(each)}"
            return {key: plain(item) for key, item in each.items()}
        return each

    return json.dumps(plain(value)).encode(), tensors


def decoded(text: bytes, tensors: Iterator[Tensor]) -> Any:
    return _filled(json.loads(text), lambda dtype, shape: next(tensors))


def _filled(value: Any, tensor: Callable[[str, list[int]], Tensor]) -> Any:
    if isinstance(value, list):
        return [_filled(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensor(*value["$tensor"])
    if "$tuple" in value:
        return tuple(_filled(value["$tuple"], tensor))
    return {key: _filled(item, tensor) for key, item in value.items()}


def send(value: Any, group: Any, source: int) -> None:
    """Send a value as the group's rank `source` to all others, which must call `receive`."""
    text, tensors = encoded(value)
    sent = [_bytes_of(tensor) for tensor in tensors]
    first = torch.cat([
        torch.frombuffer(bytearray(text), dtype=torch.uint8), *(each for each in sent if len(each) <= _LARGE_BYTES)
    ])  # fmt: skip
    dist.broadcast(torch.tensor([len(text), len(first)]), group=group, group_src=source)
    for part in (first, *(each for each in sent if len(each) > _LARGE_BYTES)):
        dist.broadcast(part, group=group, group_src=source)


def receive(group: Any, source: int) -> Any:
    lengths = torch.zeros(2, dtype=torch.int64)
    dist.broadcast(lengths, group=group, group_src=source)
    length, total = lengths.tolist()
    first = torch.empty(total, dtype=torch.uint8)
    dist.broadcast(first, group=group, group_src=source)
    place = length

    def tensor(dtype: str, shape: list[int]) -> Tensor:
        nonlocal place
        empty = torch.empty(shape, dtype=_TENSOR_DTYPES[dtype])
        content = _bytes_of(empty)
        if len(content) > _LARGE_BYTES:
            dist.broadcast(content, group=group, group_src=source)
        else:
            content.copy_(first[place : place + len(content)])
            place += len(content)
        return empty

    return _filled(json.loads(first[:length].numpy().tobytes()), tensor)


def gather(value: Any, group: Any, num_ranks: int) -> list[Any]:
    """Return one value from each rank, without tensors, in rank order."""
    text, tensors = encoded(value)
    assert not tensors, "a gathered value has no tensors"
    length = torch.tensor([len(text)])
    lengths = [torch.empty_like(length) for _ in range(num_ranks)]
    dist.all_gather(lengths, length, group=group)
    own = torch.zeros(max(map(int, lengths)), dtype=torch.uint8)
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    parts = [torch.empty_like(own) for _ in range(num_ranks)]
    dist.all_gather(parts, own, group=group)
    texts = (part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True))
    return [decoded(each, iter(())) for each in texts]


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes as uint8 on the host, because gloo does not support every dtype."""
    if not tensor.numel():  # torch cannot view it as bytes
        return torch.empty(0, dtype=torch.uint8)
    return tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8)

"""Lossless conversion between nested state and a JSON document with named tensors."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rlhfspec.errors import InvalidRequest
from rlhfspec.training.modeling.stored import PartOf

Tensors = dict[str, torch.Tensor | PartOf]


@dataclass
class _Packer:
    tensors: Tensors = field(default_factory=dict)

    def pack(self, value: Any, path: str) -> Any:
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": str(value)}
        if isinstance(value, (torch.Tensor, PartOf)):
            return {"$tensor": self._named(path, value)}
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, (list, tuple)):
            items = [self.pack(item, f"{path}.{index}") for index, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        if isinstance(value, dict):
            return self._dict(value, path)
        raise InvalidRequest(path, value, f"a {type(value).__name__} cannot be kept in a checkpoint")

    def _dict(self, value: dict[Any, Any], path: str) -> Any:
        for key in value:
            if isinstance(key, bool) or not isinstance(key, (str, int)):
                raise InvalidRequest(path, key, "keys in a checkpoint are text or whole numbers")
        packed = [(key, self.pack(item, f"{path}.{key}" if path else str(key))) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(packed)
        return {"$items": [list(pair) for pair in packed]}

    def _named(self, path: str, tensor: torch.Tensor | PartOf) -> str:
        name, number = path or "value", 2
        while name in self.tensors:
            name, number = f"{path}#{number}", number + 1
        self.tensors[name] = tensor
        return name


def pack(state: Any) -> tuple[Any, Tensors]:
    """Split a state into a JSON document and tensors by name."""
    packer = _Packer()
    return packer.pack(state, ""), packer.tensors


def unpack(document: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(document, list):
        return [unpack(item, tensors) for item in document]
    if not isinstance(document, dict):
        return document
    tag = next(iter(document), "")
    if not tag.startswith("$"):
        return {key: unpack(item, tensors) for key, item in document.items()}
    value = document[tag]
    match tag:
        case "$tensor":
            return tensors[value]
        case "$float":
            return float(value)
        case "$bytes":
            return base64.b64decode(value)
        case "$tuple":
            return tuple(unpack(item, tensors) for item in value)
        case _:
            assert tag == "$items", tag
            return {key: unpack(item, tensors) for key, item in value}

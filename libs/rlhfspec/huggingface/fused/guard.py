"""Guard for model code that calls torch directly, so that a row's bits do not depend on its neighbours.

Weight matmuls run on rlhfspec's kernels, elementwise functions on whole vectors, since scalar code rounds differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rlhfspec.huggingface.fused.audit import not_audited
from rlhfspec.huggingface.fused.casting import Precision
from rlhfspec.kernels.linear import PackedLinear, arithmetic_beside

Key = tuple[int, tuple[int, ...], tuple[int, ...]]
_PIECE = 16384  # elements: below torch's grain size, so that one thread runs them all
_FEW_TERMS = 16  # terms of a product that are added one by one
_VECTOR = 64  # elements; no vector unit is wider


class WeightProducts(TorchFunctionMode):
    """Function mode that runs `product` for matmuls of rows with a registered weight or a slice of one."""

    def __init__(self) -> None:
        super().__init__()
        self._weights: dict[int, tuple[Tensor, torch.dtype]] = {}  # by storage; with the kept type of each
        self._table = self._handlers()

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def other_product(self, one: Tensor, other: Tensor) -> Any:
        return NotImplemented

    def know(self, weights: Iterable[tuple[str, Tensor]], precision: Precision) -> None:
        for name, weight in weights:
            self._weights[weight.untyped_storage().data_ptr()] = weight, precision.of(name)

    def copied(self, weight: Tensor, copy: Tensor) -> None:
        """Register a copy of a known weight as that weight, until `gone` is called for the copy."""
        known = self._weights.get(weight.untyped_storage().data_ptr())
        if known is not None:
            self._weights[copy.untyped_storage().data_ptr()] = known

    def gone(self, copy: Tensor) -> None:
        self._weights.pop(copy.untyped_storage().data_ptr(), None)

    def forget(self) -> None:
        """Release all weights, because transformers may keep this object alive."""
        self._weights.clear()

    def kept_as(self, weight: Tensor) -> torch.dtype:
        return self._weights[weight.untyped_storage().data_ptr()][1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = self._table.get(func)
        if handler is not None:
            result = handler(func, args, kwargs or {})
            if result is not NotImplemented:
                return result
        return func(*args, **(kwargs or {}))

    def _handlers(self) -> dict[Any, Callable[[Any, Any, Any], Any]]:
        return {
            functional.linear: self._linear,
            torch.matmul: self._matmul, Tensor.matmul: self._matmul, Tensor.__matmul__: self._matmul,
            torch.mm: self._matmul, Tensor.mm: self._matmul,
            torch.bmm: self._matmul, Tensor.bmm: self._matmul,
            torch.addmm: self._addmm, Tensor.addmm: self._addmm,
        }  # fmt: skip

    def _linear(self, func: Any, args: Any, kwargs: Any) -> Any:
        rows, weight, bias = _arguments(args, kwargs, ("input", "weight", "bias"))
        if not self._is_weight(weight, rows):
            return NotImplemented
        product = self.product(rows, weight)
        return product if bias is None else product + bias

    def _matmul(self, func: Any, args: Any, kwargs: Any) -> Any:
        rows, weight = args
        if not self._is_weight(weight, rows) or weight.ndim not in (2, 3):
            return self.other_product(rows, weight)
        if weight.ndim == 2:
            return self.product(rows, weight.T)
        if rows.ndim != 3 or len(rows) != len(weight):
            return NotImplemented
        return torch.stack([self.product(one, each.T) for one, each in zip(rows, weight, strict=True)])

    def _addmm(self, func: Any, args: Any, kwargs: Any) -> Any:
        bias, rows, weight = args
        return NotImplemented if kwargs or not self._is_weight(weight, rows) else self.product(rows, weight.T) + bias

    def _is_weight(self, tensor: Tensor, rows: Tensor) -> bool:
        return tensor.dtype == rows.dtype == torch.float32 and tensor.untyped_storage().data_ptr() in self._weights


class Guard(WeightProducts):
    """Function mode that runs weight matmuls on rlhfspec's kernels, with packed weights kept until `forget`."""

    def __init__(self, *, arithmetic: str) -> None:
        super().__init__()
        self._arithmetic = arithmetic
        self._packed: dict[Key, PackedLinear] = {}
        self._multiplied: set[int] = set()  # storages of the weights multiplied so far

    def has_multiplied(self, weight: Tensor) -> bool:
        return weight.untyped_storage().data_ptr() in self._multiplied

    def forget(self) -> None:
        self._packed.clear()

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        self._multiplied.add(weight.untyped_storage().data_ptr())
        with not_audited():
            return self.multiply(rows, weight, self.packed(weight))

    def multiply(self, rows: Tensor, weight: Tensor, packed: PackedLinear) -> Tensor:
        return packed(rows)  # type: ignore[no-any-return]

    def other_product(self, one: Tensor, other: Tensor) -> Any:
        """Multiply batches of matrices that sum few terms per element, in order. Others give NotImplemented."""
        if min(one.ndim, other.ndim) < 3 or one.shape[-1] > _FEW_TERMS or one.shape[:-2] != other.shape[:-2]:
            return NotImplemented
        return (one[..., :, :, None] * other[..., None, :, :]).sum(-2)

    def packed(self, weight: Tensor) -> PackedLinear:
        key = (weight.data_ptr(), tuple(weight.shape), tuple(weight.stride()))
        packed = self._packed.get(key)
        if packed is None:
            kept_as = self.kept_as(weight)
            arithmetic = arithmetic_beside(self._arithmetic, kept_as)
            packed = PackedLinear(weight.shape[1], weight.shape[0], dtype=kept_as, arithmetic=arithmetic)
            packed.load_weight(weight)
            self._packed[key] = packed
        return packed

    def _handlers(self) -> dict[Any, Callable[[Any, Any, Any], Any]]:
        complex_products = dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__), _complex_product)
        return super()._handlers() | complex_products | dict.fromkeys(_BY_PLACE, _on_whole_vectors)


def _complex_product(func: Any, args: Any, kwargs: Any) -> Any:
    """Multiply complex numbers by their parts: torch's vector and scalar code round differently."""
    one, other = args[:2]
    if kwargs or not (isinstance(one, Tensor) and one.is_complex()):
        return NotImplemented
    if not (isinstance(other, Tensor) and other.is_complex()):
        return torch.complex(one.real * other, one.imag * other)
    return torch.complex(one.real * other.real - one.imag * other.imag, one.real * other.imag + one.imag * other.real)


_BY_PLACE: tuple[Any, ...] = (  # the last bit depends on an element's place
    torch.sigmoid, Tensor.sigmoid, functional.sigmoid, functional.silu, functional.gelu, functional.softplus,
    functional.mish, functional.elu, functional.celu, functional.selu, torch.exp2, Tensor.exp2, torch.special.expit,
    torch.pow, Tensor.pow, Tensor.__pow__,
)  # fmt: skip


def _on_whole_vectors(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an elementwise function in vector code only, by padding its first argument."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, Tensor) or not x.is_floating_point() or any(isinstance(arg, Tensor) for arg in args[1:]):
        return NotImplemented
    flat = x.reshape(-1)
    padding = -len(flat) % _VECTOR
    if padding:
        flat = torch.cat([flat, flat.new_ones(padding)])
    with not_audited():
        pieces = [func(piece, *args[1:], **kwargs) for piece in torch.split(flat, _PIECE)]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return whole[: x.numel()].reshape(x.shape)


def _arguments(args: Any, kwargs: Any, names: tuple[str, ...]) -> list[Any]:
    return [args[place] if place < len(args) else kwargs.get(name) for place, name in enumerate(names)]

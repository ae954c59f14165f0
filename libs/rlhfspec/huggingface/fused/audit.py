"""Audit of a forward for torch functions that can make a row's bits depend on other rows."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhfspec.common.context import holding


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Functions that compute are proved one by one in tests/torch/huggingface/test_guard.py.
MOVING = _words("""
    alias all any arange argmax argmin argsort bincount bitwise_and bitwise_not bitwise_or broadcast_to bucketize
    cat chunk clone complex concat concatenate constant_pad_nd contiguous copy cumsum detach diagonal diff dropout
    embedding empty empty_like empty_strided eq expand expand_as fill flatten flip full full_like gather ge greater
    greater_equal gt histc imag index index_put index_select is_nonzero isfinite isin isinf isnan item le less
    less_equal lift_fresh logical_and logical_not logical_or lt masked_fill masked_scatter masked_select movedim mT
    narrow ne new_empty new_full new_ones new_zeros nonzero not_equal numpy_T one_hot ones ones_like pad permute
    randint ravel real repeat repeat_interleave reshape resolve_conj resolve_neg roll scalar_tensor scatter
    searchsorted select slice sort split split_with_sizes squeeze stack swapaxes swapdims t take_along_dim
    tensor_split tile to topk transpose tril triu type_as unbind unflatten unsafe_chunk unsafe_split unsqueeze view
    view_as view_as_complex view_as_real where zero zeros zeros_like __and __or _local_scalar_dense _reshape_alias
    _to_copy _unsafe_view
""")
ELEMENTWISE = _words("""
    abs absolute add addcdiv addcmul ceil clamp clamp_max clamp_min clip cos div divide erf exp expm1 floor
    floor_divide hardsigmoid hardswish hardtanh leaky_relu lerp log log10 log1p log2 log_sigmoid maximum minimum mul
    multiply neg negative polar prelu reciprocal relu relu6 remainder round rsqrt rsub sgn sign sin sqrt square sub
    subtract tan tanh threshold true_divide trunc
""")
REDUCING = _words("""
    amax amin cumprod index_add layer_norm linalg_vector_norm log_softmax logsumexp max mean min native_layer_norm
    norm prod rms_norm softmax std sum var var_mean _log_softmax _softmax
""")
_BY_ROW = MOVING | ELEMENTWISE | REDUCING | {"power by multiplication", "product over one"}
_EXPONENTS = (0, 0.5, 1, 2, 3, -0.5, -1, -2)  # computed by multiplication, division and roots

_is_silent: ContextVar[bool] = ContextVar("what runs in this thread is known to be right", default=False)


def not_audited() -> AbstractContextManager[None]:
    """Exempt the code inside from the audit, because its rows are known to be independent."""
    return holding(_is_silent, True)


class Audit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records the torch calls of a forward as (path of the innermost module, function)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: set[tuple[str, str]] = set()
        self._model = model
        self._paths = {module: path for path, module in model.named_modules()}
        self._stack: list[str] = [""]

    def __enter__(self) -> Audit:
        self._handles = []
        for module in self._model.modules():
            self._handles.append(module.register_forward_pre_hook(self._push))
            self._handles.append(module.register_forward_hook(self._pop))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_silent.get():
            self.calls.add((self._stack[-1], _name_of(func, args)))
        return func(*args, **(kwargs or {}))

    @property
    def by_company(self) -> list[tuple[str, str]]:
        """Return the recorded calls in which a row's bits may depend on other rows."""
        return sorted((path, name) for path, name in self.calls if name not in _BY_ROW)

    def _push(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._paths[module])

    def _pop(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs or {}))
        self._storages |= {each.untyped_storage().data_ptr() for each in given if isinstance(each, Tensor)}
        return func(*args, **(kwargs or {}))

    def has_read(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._storages


def _name_of(func: Any, args: Any) -> str:
    name: str = func._schema.name.rpartition("::")[2].rstrip("_")
    if name == "pow" and isinstance(args[0], Tensor) and not isinstance(args[1], Tensor) and args[1] in _EXPONENTS:
        return "power by multiplication"
    if name in ("matmul", "bmm") and args[0].shape[-1] == 1:
        return "product over one"
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if name in ("mul", "div") and any(tensor.is_complex() for tensor in tensors):
        return f"complex {name}"
    return name

"""CPU linear layers, gated MLPs and activations for inference, batch-invariant with the kernel library."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.cpu.packing import PAD_OUTPUTS, STORED, empty_packed, pack, round_up

Arithmetic = Literal["fma", "amx", "dpbf16", "torch", "int8", "vnni"]  # the last two: of copies (int8.py)
ActivationName = Literal["silu", "gelu_tanh", "gelu", "relu"]

ACTIVATIONS: dict[str, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}  # the numbers of csrc/activation.h
ISA_OF = {"amx": "amx", "dpbf16": "avx512bf16", "vnni": "avx512vnni"}  # arithmetics with their own instruction set


@functools.cache
def amx_permitted() -> bool:
    """Return whether this CPU has AMX bf16 tiles and Linux lets this process use them."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return build.supports("amx") and ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


@functools.cache
def available_arithmetics(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the arithmetics available for weights of `dtype`, fastest first. On Intel, FMA beats bf16 dot products."""
    if dtype not in STORED:
        raise ValueError(f"dtype: packed weights are float32 or bfloat16 (got {dtype})")
    if build.load() is None:
        return ("torch",)
    if dtype is torch.float32:
        return ("fma", "torch")
    amx = ["amx"] if amx_permitted() else []
    dot = ["dpbf16"] if build.supports("avx512bf16") else []
    middle = [*dot, "fma"] if build.cpu_vendor() == "AuthenticAMD" else ["fma", *dot]
    return (*amx, *middle, "torch")


def arithmetic_for(dtype: torch.dtype, wanted: str = "auto", device: str = "cpu") -> Arithmetic:
    """Return `wanted`, or the fastest available arithmetic if `auto`. Raise ValueError if it is unavailable."""
    available = available_arithmetics(dtype) if device.startswith("cpu") else ("torch",)
    if wanted == "auto":
        return available[0]  # type: ignore[return-value]
    if wanted not in available:
        raise ValueError(f"arithmetic: must be auto or one of {available} for {dtype} on {device} (got {wanted!r})")
    return wanted  # type: ignore[return-value]


def arithmetic_beside(arithmetic: str, dtype: torch.dtype) -> str:
    """Return the arithmetic of `dtype` weights in a model whose other weights use `arithmetic`.

    >>> arithmetic_beside("amx", torch.bfloat16), arithmetic_beside("amx", torch.float32)
    ('amx', 'fma')
    """
    return "fma" if dtype is torch.float32 and arithmetic in ISA_OF else arithmetic


_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, list[Any]] = {
    "linear": [_POINTER] * 4 + [_LONG] * 3 + [_INT],
    "gated_mlp": [_POINTER] * 7 + [_LONG] * 4 + [_INT] * 2,
    "rms_norm": [_POINTER] * 3 + [_LONG] * 2 + [_FLOAT] + [_INT] * 2,
    "activation": [_POINTER] * 2 + [_LONG] + [_INT] * 2,
}


@functools.cache
def native_kernel(name: str, suffix: str = "", isa: str | None = None) -> Any:
    kernel = build.function(name + suffix, isa)
    kernel.argtypes = _SIGNATURES[name]
    return kernel


@functools.cache
def matmul_kernel(name: str, arithmetic: str, dtype: torch.dtype) -> Any:
    if arithmetic in ("fma", "int8"):
        return native_kernel(name, f"_{STORED[dtype] if arithmetic == 'fma' else arithmetic}")
    return native_kernel(name, "", ISA_OF[arithmetic])


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def checked(x: Tensor, width: int) -> Tensor:
    """Return `x` as contiguous fp32. Raise ValueError unless it is fp32, on CPU, gradient-free and of this width."""
    if x.dtype is not torch.float32 or not x.is_cpu or x.shape[-1] != width:
        raise ValueError(f"x: must be float32 [..., {width}] on CPU (got {x.dtype} {tuple(x.shape)} on {x.device})")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("x: must not require a gradient (packed layers are for inference)")
    return x.contiguous()


def linear_twin(x: Tensor, weight: Tensor, bias: Tensor | None, arithmetic: str) -> Tensor:
    """Compute the layer in plain torch, rounding x as the kernels do: x [..., K], fp32 weight [N, K] -> [..., N]."""
    if arithmetic in ("amx", "dpbf16"):
        x = x.to(torch.bfloat16).float()
    return functional.linear(x, weight, bias)


class PackedLinear(nn.Module):
    """Linear layer that keeps only packed weights (stored as fp32 or bf16) and an fp32 bias."""

    def __init__(
        self, in_features: int, out_features: int, *, dtype: torch.dtype = torch.bfloat16, arithmetic: str = "auto"
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype
        self.arithmetic = arithmetic_for(dtype, arithmetic)
        # Plain attributes, not buffers: a packed layout must not be cast or saved like a weight.
        self.packed: Tensor
        self.bias: Tensor | None = None
        if self.arithmetic != "torch":
            self.packed = empty_packed(out_features, in_features, self.arithmetic, dtype)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **packing: Any) -> PackedLinear:
        packed = cls(linear.in_features, linear.out_features, **packing)
        packed.load_weight(linear.weight, linear.bias)
        return packed

    @torch.no_grad()
    def load_weight(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if tuple(weight.shape) != (self.out_features, self.in_features):
            wanted = (self.out_features, self.in_features)
            raise ValueError(f"weight: must have shape {wanted} (got {tuple(weight.shape)})")
        self.bias = None if bias is None else bias.detach().float().clone()
        if self.arithmetic == "torch":
            self.packed = weight.detach().to(self.dtype).float().clone()  # [N, K], fp32 holding stored values
        else:
            pack(weight, self.packed, self.arithmetic)

    @property
    def weight(self) -> Tensor:
        """Return a meta tensor of the weight's shape, for models that inspect layers."""
        return torch.empty(self.out_features, self.in_features, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        x = checked(x, self.in_features)
        if self.arithmetic == "torch":
            return linear_twin(x, self.packed, self.bias, self.arithmetic)
        out = torch.empty((*x.shape[:-1], self.out_features))
        matmul_kernel("linear", self.arithmetic, self.dtype)(
            x.data_ptr(),
            self.packed.data_ptr(),
            _address(self.bias),
            out.data_ptr(),
            x.numel() // self.in_features,
            self.in_features,
            self.out_features,
            build.num_threads(),
        )
        return out


def activation_twin(x: Tensor, name: str) -> Tensor:
    match name:
        case "silu":
            return functional.silu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "gelu":
            return functional.gelu(x)
        case "relu":
            return functional.relu(x)
    raise ValueError(f"activation: must be one of {tuple(ACTIVATIONS)} (got {name!r})")


def row_invariant_activation(x: Tensor, name: str) -> Tensor:
    """Apply an activation whose bits, unlike torch's, do not depend on the position in the tensor."""
    if name not in ACTIVATIONS or build.load() is None:
        return activation_twin(x, name)
    x = checked(x, x.shape[-1])
    out = torch.empty_like(x)
    native_kernel("activation")(x.data_ptr(), out.data_ptr(), x.numel(), ACTIVATIONS[name], build.num_threads())
    return out


class RowInvariantActivation(nn.Module):
    def __init__(self, name: ActivationName) -> None:
        super().__init__()
        if name not in ACTIVATIONS:
            raise ValueError(f"activation: must be one of {tuple(ACTIVATIONS)} (got {name!r})")
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return row_invariant_activation(x, self.name)


class PackedGatedMLP(nn.Module):
    """Gated MLP down(activation(gate(x)) * up(x)) in one call, with the bits of separate packed layers."""

    def __init__(
        self,
        hidden_features: int,
        intermediate_features: int,
        out_features: int,
        *,
        activation: str,
        dtype: torch.dtype = torch.bfloat16,
        arithmetic: str = "auto",
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: must be one of {tuple(ACTIVATIONS)} (got {activation!r})")
        self.hidden_features = hidden_features
        self.intermediate_features = intermediate_features
        self.out_features = out_features
        self.activation = activation
        self.dtype = dtype
        self.arithmetic = arithmetic_for(dtype, arithmetic)
        self.gate_up: Tensor  # groups of 16 outputs, alternating gate and up
        self.gate_bias: Tensor | None = None
        self.up_bias: Tensor | None = None
        self.down = PackedLinear(intermediate_features, out_features, dtype=dtype, arithmetic=self.arithmetic)
        if self.arithmetic != "torch":
            num_outputs = 2 * round_up(intermediate_features, PAD_OUTPUTS)
            self.gate_up = empty_packed(num_outputs, hidden_features, self.arithmetic, dtype)

    @classmethod
    def from_linears(cls, gate: nn.Linear, up: nn.Linear, down: nn.Linear, **packing: Any) -> PackedGatedMLP:
        mlp = cls(gate.in_features, gate.out_features, down.out_features, **packing)
        mlp.load_weights(gate.weight, up.weight, down.weight, gate.bias, up.bias, down.bias)
        return mlp

    @torch.no_grad()
    def load_weights(
        self,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        gate_bias: Tensor | None = None,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> None:
        wanted = (self.intermediate_features, self.hidden_features)
        for name, weight in (("gate", gate), ("up", up)):
            if tuple(weight.shape) != wanted:
                raise ValueError(f"{name}: must have shape {wanted} (got {tuple(weight.shape)})")
        if (gate_bias is None) != (up_bias is None):
            raise ValueError("gate_bias, up_bias: must both be given, or neither")
        self.gate_bias = None if gate_bias is None else gate_bias.detach().float().clone()
        self.up_bias = None if up_bias is None else up_bias.detach().float().clone()
        self.down.load_weight(down, down_bias)
        if self.arithmetic == "torch":
            self.gate_up = torch.stack((gate.detach(), up.detach())).to(self.dtype).float()  # [2, I, H]
            return
        pack(gate, self.gate_up, self.arithmetic, every=2, offset=0)
        pack(up, self.gate_up, self.arithmetic, every=2, offset=1)

    def forward(self, x: Tensor) -> Tensor:
        x = checked(x, self.hidden_features)
        if self.arithmetic == "torch":
            gate = linear_twin(x, self.gate_up[0], self.gate_bias, self.arithmetic)
            up = linear_twin(x, self.gate_up[1], self.up_bias, self.arithmetic)
            return self.down(activation_twin(gate, self.activation) * up)  # type: ignore[no-any-return]
        out = torch.empty((*x.shape[:-1], self.out_features))
        matmul_kernel("gated_mlp", self.arithmetic, self.dtype)(
            x.data_ptr(),
            self.gate_up.data_ptr(),
            _address(self.gate_bias),
            _address(self.up_bias),
            self.down.packed.data_ptr(),
            _address(self.down.bias),
            out.data_ptr(),
            x.numel() // self.hidden_features,
            self.hidden_features,
            self.intermediate_features,
            self.out_features,
            ACTIVATIONS[self.activation],
            build.num_threads(),
        )
        return out

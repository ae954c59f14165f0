"""Native decoder for Llama-like models: one call runs all layers. Callers first compare its bits with the layers'."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.linear import ACTIVATIONS, PackedGatedMLP, PackedLinear, matmul_kernel
from rlhfspec.kernels.norm import FusedRMSNorm
from rlhfspec.kernels.tree_attention import AttentionMeta

_POINTER, _LONG, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int


class _LinearStruct(ctypes.Structure):
    _fields_ = [
        ("multiply", _POINTER), ("packed", _POINTER), ("bias", _POINTER), ("inputs", _LONG), ("outputs", _LONG),
    ]  # fmt: skip


class _Norm(ctypes.Structure):
    _fields_ = [("weight", _POINTER), ("eps", _FLOAT), ("add_one", _INT)]


class _GatedMlp(ctypes.Structure):
    _fields_ = [
        ("run", _POINTER), ("gate_up", _POINTER), ("gate_bias", _POINTER), ("up_bias", _POINTER),
        ("down", _POINTER), ("down_bias", _POINTER),
        ("hidden", _LONG), ("intermediate", _LONG), ("outputs", _LONG), ("activation", _LONG),
    ]  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = [
        ("input_norm", _Norm), ("query_norm", _Norm), ("key_norm", _Norm), ("mlp_norm", _Norm),
        ("query", _LinearStruct), ("key", _LinearStruct), ("value", _LinearStruct), ("output", _LinearStruct),
        ("mlp", _GatedMlp), ("sliding_window", _LONG),
    ]  # fmt: skip


class _DecoderStruct(ctypes.Structure):
    """Mirror of struct Decoder in csrc/decoder.cpp."""

    _fields_ = [
        ("layers", _POINTER), ("embedding", _POINTER), ("cosine", _POINTER), ("sine", _POINTER),
        ("final_norm", _Norm), ("head", _LinearStruct), ("kv", _POINTER), ("taps", _POINTER),
        ("num_taps", _LONG), ("num_layers", _LONG), ("kv_layers", _LONG), ("hidden", _LONG),
        ("num_heads", _LONG), ("num_kv_heads", _LONG), ("head_dim", _LONG),
        ("block_size", _LONG), ("kv_is_bf16", _LONG), ("split", _LONG), ("scale", _FLOAT),
    ]  # fmt: skip


@dataclass(slots=True)
class DecoderParts:
    """Llama-like model: RMS norms, q/k/v/o_proj, optional q_norm and k_norm, rotate-half RoPE, gated MLP, head."""

    inner: Any  # embed_tokens, layers, norm
    head: PackedLinear
    scale: float
    sliding_windows: list[int]  # per layer, 0 = none
    split: int  # positions per attention softmax
    taps: tuple[int, ...] = ()  # layers whose input `forward` tells, ascending


class NativeDecoder:
    """Decoder that runs N tokens through all layers. Call `bind` after replacing a weight tensor."""

    def __init__(
        self, parts: DecoderParts, kv: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, num_heads: int
    ) -> None:
        self.parts = parts
        self.kv = kv
        self.rotary = (cosine.contiguous(), sine.contiguous())  # [positions, head_dim]
        self.num_heads = num_heads
        self.num_slots = kv.shape[0] * kv.shape[3]
        self.vocab_size = parts.head.out_features
        self._forward = build.function("decoder_forward")
        self._forward.argtypes = [_POINTER] * 4 + [_LONG, _POINTER, _LONG, _POINTER, _POINTER, _INT]
        self._taps = np.array(parts.taps, np.int64)
        self.tapped = torch.empty(0)  # [N, taps, hidden] inputs of the tapped layers in the last forward
        build.check_sizes("decoder", ctypes.sizeof(_DecoderStruct), ctypes.sizeof(_Layer))
        self.bind()

    def bind(self) -> None:
        inner = self.parts.inner
        windows = self.parts.sliding_windows
        layers = [_layer(layer, window) for layer, window in zip(inner.layers, windows, strict=True)]
        self._layers = (_Layer * len(layers))(*layers)
        _, kv_layers, _, block_size, num_kv_heads, head_dim = self.kv.shape
        self._struct = _DecoderStruct(
            ctypes.addressof(self._layers), inner.embed_tokens.weight.data_ptr(),
            self.rotary[0].data_ptr(), self.rotary[1].data_ptr(),
            _norm(inner.norm), _linear(self.parts.head), self.kv.data_ptr(),
            self._taps.ctypes.data, len(self._taps), len(layers), kv_layers,
            inner.embed_tokens.embedding_dim, self.num_heads, num_kv_heads, head_dim,
            block_size, self.kv.dtype == torch.bfloat16, self.parts.split, self.parts.scale,
        )  # fmt: skip
        self.address = ctypes.addressof(self._struct)

    def forward(
        self,
        tokens: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        meta: AttentionMeta,
        wanted: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """Return logits [n, V] of rows `wanted` [n] for tokens and positions [N]. Raise ValueError if out of range."""
        batch = meta.native()
        if len(positions) and not 0 <= positions.min() <= positions.max() < len(self.rotary[0]):
            raise ValueError(f"positions: must be below {len(self.rotary[0])} (got {positions.max()})")
        if batch.highest_slot >= self.num_slots:
            raise ValueError(f"meta: slot {batch.highest_slot} is outside the cache's {self.num_slots}")
        logits = torch.empty((len(wanted), self.vocab_size))
        self.tapped = torch.empty((len(tokens), len(self._taps), self.parts.inner.embed_tokens.embedding_dim))
        self._forward(
            self.address, batch.address, tokens.ctypes.data, positions.ctypes.data, len(tokens),
            wanted.ctypes.data, len(wanted), logits.data_ptr(), self.tapped.data_ptr(), build.num_threads(),
        )  # fmt: skip
        return logits


def _layer(layer: Any, sliding_window: int) -> _Layer:
    attention = layer.self_attn
    none = _Norm(None, 0.0, 0)
    mlp: PackedGatedMLP = layer.mlp
    down = _linear(mlp.down)
    return _Layer(
        _norm(layer.input_layernorm),
        _norm(attention.q_norm) if hasattr(attention, "q_norm") else none,
        _norm(attention.k_norm) if hasattr(attention, "k_norm") else none,
        _norm(layer.post_attention_layernorm),
        _linear(attention.q_proj), _linear(attention.k_proj), _linear(attention.v_proj), _linear(attention.o_proj),
        _GatedMlp(
            _kernel("gated_mlp", mlp), mlp.gate_up.data_ptr(), _data(mlp.gate_bias), _data(mlp.up_bias),
            down.packed, down.bias,
            mlp.hidden_features, mlp.intermediate_features, mlp.out_features, ACTIVATIONS[mlp.activation],
        ),
        sliding_window,
    )  # fmt: skip


def _linear(layer: PackedLinear) -> _LinearStruct:
    packed = layer.packed.data_ptr()
    return _LinearStruct(_kernel("linear", layer), packed, _data(layer.bias), layer.in_features, layer.out_features)


def _norm(norm: FusedRMSNorm) -> _Norm:
    return _Norm(norm.weight.data_ptr(), norm.eps, norm.add_one)


def _kernel(name: str, layer: PackedLinear | PackedGatedMLP) -> int | None:
    return _address_of(matmul_kernel(name, layer.arithmetic, layer.dtype))


def _data(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _address_of(function: Any) -> int | None:
    return ctypes.cast(function, _POINTER).value

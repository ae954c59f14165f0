"""Puts our kernels under an unmodified Hugging Face model, module by module.

Nothing here knows a model by name. A module is swapped only when a probe on random input shows that ours computes
the same function; what is not recognised keeps running as it is. Every swap leaves a loader behind, so that new
weights find their place by their Hugging Face names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rlhfspec.kernels.linear import (
    ActivationName,
    FusedRMSNorm,
    PackedGatedMLP,
    PackedLinear,
    RowInvariantActivation,
)

Loader = tuple[tuple[str, ...], Callable[..., None]]  # weight names, and what takes those weights ("" gives None)
_ACTIVATIONS: dict[ActivationName, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": functools.partial(nn.functional.gelu, approximate="tanh"),
    "relu": nn.functional.relu,
}


@dataclass(slots=True)
class FusedModel:
    """The swapped model and where each named weight goes."""

    model: Any  # a Hugging Face causal LM
    dtype: torch.dtype  # storage of the linear weights
    arithmetic: str
    shapes: dict[str, torch.Size] = field(default_factory=dict)  # every weight by its Hugging Face name
    loaders: list[Loader] = field(default_factory=list)
    swapped: dict[str, int] = field(default_factory=dict)  # kind -> count, for reports

    def load(self, state_dict: dict[str, torch.Tensor]) -> None:
        """All or nothing: every weight must be there in its shape, and no unknown name."""
        tied = _tied_names(self.model)
        given = dict(state_dict)
        for name, source in tied.items():
            if name not in given and source in given:
                given[name] = given[source]
        missing = [name for name in self.shapes if name not in given]
        unknown = [name for name in given if name not in self.shapes]
        if missing or unknown:
            raise ValueError(f"state_dict: missing {missing[:4]}, unknown {unknown[:4]}")
        wrong = [name for name, tensor in given.items() if tensor.shape != self.shapes[name]]
        if wrong:
            name = wrong[0]
            raise ValueError(f"state_dict: {name} has shape {list(given[name].shape)}, not {list(self.shapes[name])}")
        for names, load in self.loaders:
            load(*(given[name].detach() if name else None for name in names))

    def round(self, tensor: torch.Tensor) -> torch.Tensor:
        """The weight as stored: bf16 models are exactly the bf16-rounded weights, computed in fp32."""
        return tensor.to(self.dtype).to(torch.float32) if self.dtype != torch.float64 else tensor.to(torch.float64)


def _tied_names(model: nn.Module) -> dict[str, str]:
    config: Any = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False):
        return {}
    tied = getattr(model, "_tied_weights_keys", None) or {}
    return dict(tied) if isinstance(tied, dict) else {}


@torch.inference_mode()
def fuse(model: nn.Module, *, dtype: torch.dtype, arithmetic: str, max_context: int) -> FusedModel:
    """Swap linear layers, gated MLPs, norms, activations and rotary tables, in that order of containment."""
    fused = FusedModel(model=model, dtype=dtype, arithmetic=arithmetic)
    fused.shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    native = arithmetic != "torch"
    for parameter in model.parameters():
        parameter.data = fused.round(parameter.data)
    for name, module in list(model.named_modules()):
        if native and _attached(model, name):
            _swap(fused, name, module)
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RotaryEmbedding"):
            _replace(model, name, RotaryTable(module, max_context))
            fused.swapped["rotary"] = fused.swapped.get("rotary", 0) + 1
    taken = {name for names, _ in fused.loaders for name in names}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in fused.shapes and name not in taken:
            fused.loaders.append(((name,), _tensor_loader(fused, tensor)))
    return fused


def _swap(fused: FusedModel, name: str, module: nn.Module) -> None:
    for kind, attempt in (("gated_mlp", _gated_mlp), ("linear", _linear), ("norm", _norm), ("activation", _activation)):
        replacement = attempt(fused, name, module)
        if replacement is not None:
            _replace(fused.model, name, replacement)
            fused.swapped[kind] = fused.swapped.get(kind, 0) + 1
            return


def _gated_mlp(fused: FusedModel, name: str, module: nn.Module) -> nn.Module | None:
    gate, up, down = (getattr(module, part, None) for part in ("gate_proj", "up_proj", "down_proj"))
    activation = _activation_name(getattr(module, "act_fn", None))
    if not (isinstance(gate, nn.Linear) and isinstance(up, nn.Linear) and isinstance(down, nn.Linear)):
        return None
    if activation is None:
        return None
    x = torch.randn(3, gate.in_features)
    expected = down(_ACTIVATIONS[activation](gate(x)) * up(x))
    if not torch.allclose(module(x), expected, rtol=1e-4, atol=1e-5):
        return None
    packed = PackedGatedMLP.from_linears(
        gate, up, down, activation=activation, dtype=fused.dtype, arithmetic=fused.arithmetic
    )
    parts_of = [f"{name}.{part}_proj.weight" for part in ("gate", "up", "down")]
    biases = [f"{name}.{part}_proj.bias" for part in ("gate", "up", "down")]
    biases = [bias if bias in fused.shapes else "" for bias in biases]
    fused.loaders.append(((*parts_of, *biases), _weights_loader(fused, packed.load_weights, num_matrices=3)))
    return packed


def _linear(fused: FusedModel, name: str, module: nn.Module) -> nn.Module | None:
    if type(module) is not nn.Linear:
        return None
    packed = PackedLinear.from_linear(module, dtype=fused.dtype, arithmetic=fused.arithmetic)
    bias = "" if module.bias is None else f"{name}.bias"
    fused.loaders.append(((f"{name}.weight", bias), _weights_loader(fused, packed.load_weight, num_matrices=1)))
    return packed


def _weights_loader(fused: FusedModel, load: Callable[..., None], *, num_matrices: int) -> Callable[..., None]:
    """Matrices are rounded as they are packed, biases here: later weights like the first ones."""

    def rounded(*tensors: torch.Tensor | None) -> None:
        biases = (None if bias is None else fused.round(bias) for bias in tensors[num_matrices:])
        load(*tensors[:num_matrices], *biases)

    return rounded


def _norm(fused: FusedModel, name: str, module: nn.Module) -> nn.Module | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or weight is None or eps is None:
        return None
    x = torch.randn(3, weight.shape[0])
    original = weight.data.clone()
    weight.data = original + 0.1 * torch.randn_like(original)  # a probe weight that tells (1 + w) from w
    expected = module(x)
    for add_one in (False, True):
        candidate = FusedRMSNorm(weight.data, float(eps), add_one=add_one)
        if torch.allclose(candidate(x), expected, rtol=1e-5, atol=1e-6):
            weight.data = original
            norm = FusedRMSNorm(original, float(eps), add_one=add_one)
            fused.loaders.append(((f"{name}.weight",), _norm_loader(fused, norm)))
            return norm
    weight.data = original
    return None


def _norm_loader(fused: FusedModel, norm: FusedRMSNorm) -> Callable[[torch.Tensor], None]:
    return lambda tensor: norm.load_weight(fused.round(tensor))


def _activation(fused: FusedModel, name: str, module: nn.Module) -> nn.Module | None:
    if isinstance(module, RowInvariantActivation) or any(True for _ in module.children()):
        return None
    kind = _activation_name(module)
    return None if kind is None else RowInvariantActivation(kind)


def _activation_name(module: Any) -> ActivationName | None:
    """Which of our activations this parameter-free module computes, found by probing."""
    if (
        not isinstance(module, nn.Module)
        or any(True for _ in module.parameters())
        or any(True for _ in module.buffers())
    ):
        return None
    if not any(word in type(module).__name__.lower() for word in ("silu", "gelu", "relu", "swish")):
        return None
    x = torch.linspace(-6, 6, 97)
    result = module(x)
    close = (name for name, f in _ACTIVATIONS.items() if torch.allclose(result, f(x), rtol=1e-6, atol=1e-6))
    return next(close, None)


class RotaryTable(nn.Module):
    """cos and sin of every position, computed once in one shape and then only looked up.

    Hugging Face computes them anew for each batch, where vector and scalar code round differently;
    a lookup cannot depend on the batch.
    """

    def __init__(self, original: nn.Module, max_context: int) -> None:
        super().__init__()
        self.original = original
        self.max_context = max_context
        self._tables: dict[tuple[Any, ...], tuple[torch.Tensor, ...]] = {}

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """x [1, N, hidden] (only its dtype matters), position_ids [1, N] -> cos, sin [1, N, D]."""
        key = (x.dtype, x.device, *args, *sorted(kwargs.items()))
        if key not in self._tables:
            every_position = torch.arange(self.max_context, device=x.device)[None]
            tables = self.original(x, every_position, *args, **kwargs)
            self._tables[key] = tuple(table[0].contiguous() for table in tables)
        return tuple(table.index_select(0, position_ids[0])[None] for table in self._tables[key])

    def tables(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...] | None:
        """cos and sin [positions, D] as used so far; None unless there is exactly one pair for this dtype."""
        found = [tables for key, tables in self._tables.items() if key[0] == dtype]
        return found[0] if len(found) == 1 and len(found[0]) == 2 else None


def _tensor_loader(fused: FusedModel, kept: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def load(tensor: torch.Tensor) -> None:
        kept.data.copy_(fused.round(tensor))

    return load


def _attached(model: nn.Module, name: str) -> bool:
    """False when an ancestor was swapped out in the meantime, and for the model itself."""
    if not name:
        return False
    *path, leaf = name.split(".")
    parent: Any = model
    for part in path:
        parent = getattr(parent, part, None)
    return isinstance(parent, nn.Module) and leaf in dict(parent.named_children())


def _replace(model: nn.Module, name: str, replacement: nn.Module) -> None:
    parent_name, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent_name), leaf, replacement)


def attention_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that will call AttentionInterface: those that know which layer they are in."""
    return (module for module in model.modules() if hasattr(module, "layer_idx"))

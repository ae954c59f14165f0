"""Replacement of a Hugging Face model's modules by modules on kernels.

A module is replaced if its class is known exactly, or if both agree on inputs of every size (`_agree`). Others whose
bits depend on neighbouring rows run inside a `Guard`, or the model is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import activations
from transformers.pytorch_utils import Conv1D

from rlhfspec.errors import UnsupportedModel
from rlhfspec.huggingface.fused.audit import Audit
from rlhfspec.huggingface.fused.casting import Precision
from rlhfspec.huggingface.fused.experts import PackedExperts, is_experts
from rlhfspec.huggingface.fused.guard import Guard
from rlhfspec.huggingface.fused.rotary import RotaryTable
from rlhfspec.huggingface.fused.widened import outside, widen
from rlhfspec.huggingface.structure.causal_lm import CausalLM, anatomy_of
from rlhfspec.huggingface.structure.layers import layers_of
from rlhfspec.kernels.linear import (
    ActivationName,
    PackedGatedMLP,
    PackedLinear,
    RowInvariantActivation,
    activation_twin,
    arithmetic_beside,
)
from rlhfspec.kernels.norm import FusedRMSNorm

Loader = tuple[tuple[str, ...], Callable[..., None]]  # weight names, and the loader of these weights ("" gives None)
_ACTIVATIONS: dict[type, ActivationName] = {  # classes whose forward is exactly this function
    nn.SiLU: "silu",
    activations.SiLUActivation: "silu",
    nn.ReLU: "relu",
    activations.GELUActivation: "gelu",
    activations.GELUTanh: "gelu_tanh",
    activations.NewGELUActivation: "gelu_tanh",
    activations.FastGELUActivation: "gelu_tanh",
    activations.AccurateGELUActivation: "gelu_tanh",
}
_SCALES = (1e-3, 0.1, 1.0, 30.0, 1e3)  # of probes: eps shows in small values, clamps and caps in large ones


@dataclass(slots=True)
class FusedModel:
    model: Any  # a Hugging Face causal LM
    precision: Precision  # in which the weights are kept
    arithmetic: str
    guard: Guard
    shapes: dict[str, torch.Size] = field(default_factory=dict)  # every weight by its Hugging Face name
    loaders: list[Loader] = field(default_factory=list)

    def load(self, state_dict: dict[str, Tensor]) -> None:
        """Load all weights or none. Raise ValueError for missing, unknown or misshaped ones."""
        given = self.checked(state_dict, self.shapes)
        for names, load in self.loaders:
            load(*(given[name].detach() if name else None for name in names))
        self.guard.forget()

    def checked(self, state_dict: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        tied = _tied_names(self.model)
        given = dict(state_dict)
        for name, source in tied.items():
            if name not in given and source in given:
                given[name] = given[source]
        missing = [name for name in shapes if name not in given]
        unknown = [name for name in given if name not in shapes]
        if missing or unknown:
            raise ValueError(f"state_dict: missing {missing[:4]}, unknown {unknown[:4]}")
        wrong = [name for name, tensor in given.items() if tensor.shape != shapes[name]]
        if wrong:
            name = wrong[0]
            raise ValueError(f"state_dict: {name} has shape {list(given[name].shape)}, not {list(shapes[name])}")
        return given

    def packing(self, name: str) -> dict[str, Any]:
        kept_as = self.precision.of(name)
        return {"dtype": kept_as, "arithmetic": arithmetic_beside(self.arithmetic, kept_as)}

    def held(self) -> Iterator[Tensor]:
        """Yield every tensor that a forward reads."""
        for module in self.model.modules():
            yield from _held(module)


def _held(module: nn.Module) -> Iterator[Tensor]:
    values = (*vars(module).values(), *module._parameters.values(), *module._buffers.values())
    yield from (value for value in values if isinstance(value, Tensor))
    if isinstance(module, RotaryTable):
        yield from module.held()
    if isinstance(module, PackedExperts):
        for layer in (*module.mlps, *module.ups, *module.downs):
            yield from _held(layer)
            yield from _held(layer.down) if isinstance(layer, PackedGatedMLP) else ()


def _tied_names(model: nn.Module) -> dict[str, str]:
    config: Any = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False):
        return {}
    tied = getattr(model, "_tied_weights_keys", None) or {}
    return dict(tied) if isinstance(tied, dict) else {}


@torch.inference_mode()
def fuse(model: nn.Module, precision: Precision, *, arithmetic: str, max_context: int) -> FusedModel:
    """Replace experts, gated MLPs, linear layers, norms, activations and rotary tables, outer modules first.

    Parameters must already be rounded by `casting`. Layers are widened to float32 one by one.
    """
    fused = FusedModel(model, precision, arithmetic, Guard(arithmetic=arithmetic))
    fused.shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    native = arithmetic != "torch"
    called = anatomy_of(model).called
    if native:
        layers = layers_of(model)
        widen(outside(model, layers))
        for name in [name for name, _ in model.named_modules()]:
            if name in called and _attached(model, name):
                module = model.get_submodule(name)
                if module in layers:
                    widen(module.parameters())
                _swap(fused, name, module)
        widen(model.parameters())
    for name, module in list(model.named_modules()):
        if name in called and type(module).__name__.endswith("RotaryEmbedding"):
            _replace(model, name, RotaryTable(module, max_context))
    taken = {name for names, _ in fused.loaders for name in names}
    for name in model.state_dict():
        if name in fused.shapes and name not in taken:
            fused.loaders.append(((name,), _tensor_loader(fused, name)))
    fused.guard.know(model.named_parameters(), precision)
    return fused


@torch.inference_mode()
def fuse_layer(layer: nn.Module, precision: Precision, *, arithmetic: str) -> None:
    """Replace modules as `fuse` does in a layer outside the model, which need not give the same bits beside others."""
    fused = FusedModel(layer, precision, arithmetic, Guard(arithmetic=arithmetic))
    for name in [name for name, _ in layer.named_modules()]:
        if _attached(layer, name):
            _swap(fused, name, layer.get_submodule(name))


def guard_rows(model: Any, guard: Guard, parts: CausalLM, run: Callable[[], object], *, name: str) -> tuple[str, ...]:
    """Run modules row by row if their bits depend on other rows in `run`, and return their paths."""
    found = _audit(model, run)
    guarded = _outermost({path for path, _ in found})
    guard_paths(model, guard, parts, guarded)
    for path, function in _audit(model, run) if found else []:
        kind = type(model.get_submodule(path)).__name__
        where = path or "after the trunk"
        raise UnsupportedModel(name, kind, f"{where}: torch's {function} gives a row other bits next to other rows")
    return guarded


def guard_paths(model: Any, guard: Guard, parts: CausalLM, paths: Sequence[str]) -> None:
    """Make the modules at these paths run inside the guard; the path "" is the head."""
    for path in paths:
        if path:
            guard_forward(model.get_submodule(path), guard)
        else:
            parts.guard_head(guard)


def guard_forward(module: nn.Module, guard: Guard) -> None:
    plain = module.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with guard:
            return plain(*args, **kwargs)

    module.forward = forward


def _audit(model: nn.Module, run: Callable[[], object]) -> list[tuple[str, str]]:
    with torch.inference_mode(), Audit(model) as audit:
        run()
    return audit.by_company


def _outermost(paths: set[str]) -> tuple[str, ...]:
    return tuple(sorted(path for path in paths if not any(is_inside(path, other) for other in paths - {path})))


def is_inside(path: str, other: str) -> bool:
    """Return whether `path` is the other module or inside it; "" contains none."""
    return path == other or (bool(other) and path.startswith(f"{other}."))


def _swap(fused: FusedModel, name: str, module: nn.Module) -> None:
    for attempt in (_experts, _gated_mlp, _linear, _norm, _activation):
        replacement = attempt(fused, name, module)
        if replacement is not None:
            last = module.get_submodule("down_proj") if attempt is _gated_mlp else module
            replacement._forward_hooks.update(last._forward_hooks)  # hooks on its output
            _replace(fused.model, name, replacement)
            return


def _experts(fused: FusedModel, name: str, module: nn.Module) -> nn.Module | None:
    if not is_experts(module) or fused.precision.holds(name):
        return None
    activation = activation_of(getattr(module, "act_fn", None))
    if activation is not None:
        module.act_fn = RowInvariantActivation(activation)
    packed = PackedExperts(module, **fused.packing(name), activation=activation)
    fused.loaders.append((tuple(f"{name}.{part}" for part in packed.weight_names), packed.load_weights))
    return packed


def _gated_mlp(fused: FusedModel, name: str, module: nn.Module) -> nn.Module | None:
    gate, up, down = (getattr(module, part, None) for part in ("gate_proj", "up_proj", "down_proj"))
    activation = activation_of(getattr(module, "act_fn", None))
    if not (type(gate) is nn.Linear and type(up) is nn.Linear and type(down) is nn.Linear) or activation is None:
        return None
    if fused.precision.holds(name):
        return None
    if not _agree(module, lambda x: down(activation_twin(gate(x), activation) * up(x)), gate.in_features):
        return None
    packed = PackedGatedMLP.from_linears(gate, up, down, activation=activation, **fused.packing(name))
    parts = [f"{name}.{part}_proj" for part in ("gate", "up", "down")]
    _add_loader(fused, [f"{part}.weight" for part in parts], [f"{part}.bias" for part in parts], packed.load_weights)
    return packed


def _linear(fused: FusedModel, name: str, module: nn.Module) -> nn.Module | None:
    if type(module) is nn.Linear:
        packed = PackedLinear.from_linear(module, **fused.packing(f"{name}.weight"))
        load = packed.load_weight
    elif type(module) is Conv1D:  # GPT-2's linear layer keeps its weight transposed
        packed = PackedLinear(module.nx, module.nf, **fused.packing(f"{name}.weight"))
        load = functools.partial(_load_transposed, packed)
        load(module.weight, module.bias)
    else:
        return None
    _add_loader(fused, [f"{name}.weight"], [f"{name}.bias"], load)
    return packed


def _load_transposed(packed: PackedLinear, weight: Tensor, bias: Tensor | None) -> None:
    packed.load_weight(weight.T, bias)


def _add_loader(fused: FusedModel, matrices: list[str], biases: list[str], load: Callable[..., None]) -> None:
    """Register `load` for these weights, rounding biases before it; matrices are rounded when packed."""
    names = (*matrices, *(bias if bias in fused.shapes else "" for bias in biases))

    def rounded_load(*tensors: Tensor | None) -> None:
        given = list(zip(names, tensors, strict=True))[len(matrices) :]
        load(*tensors[: len(matrices)], *(b if b is None else fused.precision.rounded(name, b) for name, b in given))

    fused.loaders.append((names, rounded_load))


def _norm(fused: FusedModel, name: str, module: nn.Module) -> nn.Module | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or not isinstance(weight, nn.Parameter) or not isinstance(eps, float):
        return None
    if weight.ndim != 1 or list(module.state_dict()) != ["weight"]:
        return None
    original = weight.data
    weight.data = original + 0.1 * torch.randn_like(original)  # a probe weight that distinguishes (1 + w) from w
    candidates = [FusedRMSNorm(weight.data, eps, add_one=add_one) for add_one in (False, True)]
    same = [norm.add_one for norm in candidates if _agree(module, norm, len(original), rtol=1e-5)]
    weight.data = original
    if not same:
        return None
    norm = FusedRMSNorm(original, eps, add_one=same[0])
    rounded = functools.partial(fused.precision.rounded, f"{name}.weight")
    fused.loaders.append(((f"{name}.weight",), lambda tensor: norm.load_weight(rounded(tensor))))
    return norm


def _agree(
    module: Callable[[Tensor], Any], ours: Callable[[Tensor], Tensor], width: int, *, rtol: float = 1e-4
) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([scale * torch.randn(2, width, generator=generator) for scale in _SCALES])
    try:
        expected = module(x)
    except (RuntimeError, TypeError, ValueError, IndexError):  # it does not take rows
        return False
    if not isinstance(expected, Tensor) or expected.shape[:-1] != x.shape[:-1]:
        return False
    difference = (ours(x) - expected).abs().amax(1)
    return bool((difference.nan_to_num() <= rtol * expected.abs().amax(1).nan_to_num()).all())


def _activation(fused: FusedModel, name: str, module: nn.Module) -> nn.Module | None:
    kind = activation_of(module)
    return None if kind is None else RowInvariantActivation(kind)


def activation_of(module: Any) -> ActivationName | None:
    if type(module) is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return _ACTIVATIONS.get(type(module))


def _tensor_loader(fused: FusedModel, name: str) -> Callable[[Tensor], None]:
    """Return a function that copies into the model's tensor, found anew each time as device moves replace buffers."""
    path, _, leaf = name.rpartition(".")
    module = fused.model.get_submodule(path)

    def load(tensor: Tensor) -> None:
        is_parameter = leaf in module._parameters
        getattr(module, leaf).data.copy_(fused.precision.rounded(name, tensor) if is_parameter else tensor)

    return load


def _attached(model: nn.Module, name: str) -> bool:
    """Return whether the module is still in the model."""
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

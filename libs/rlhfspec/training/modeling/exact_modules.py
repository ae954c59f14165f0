"""Engine kernels in the trainer's model, whose modules keep their parameters and names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhfspec.errors import InvalidRequest, UnsupportedModel
from rlhfspec.huggingface.fused.audit import Reads, not_audited
from rlhfspec.huggingface.fused.casting import Precision
from rlhfspec.huggingface.fused.experts import PackedExperts, by_expert, gate, oriented
from rlhfspec.huggingface.fused.fuse import FusedModel, Loader, fuse, guard_forward, guard_rows, is_inside
from rlhfspec.huggingface.fused.guard import Guard
from rlhfspec.huggingface.fused.rotary import RotaryTable
from rlhfspec.huggingface.structure.causal_lm import CausalLM
from rlhfspec.kernels.linear import PackedGatedMLP, PackedLinear, RowInvariantActivation, activation_twin
from rlhfspec.kernels.norm import FusedRMSNorm, rms_norm_twin
from rlhfspec.training.modeling.exact_functions import exact, exact_gated_mlp, exact_linear, stored
from rlhfspec.training.modeling.lora import is_adapter, merged_state

_ADAPTER = "default"
_SWAPPED = (PackedExperts, PackedGatedMLP, PackedLinear, FusedRMSNorm, RowInvariantActivation, RotaryTable)


class ExactModules:
    """The trained model's modules that run on kernels. Call `repack` after every parameter change."""

    def __init__(self, parts: CausalLM, precision: Precision, *, arithmetic: str, max_context: int) -> None:
        self.parts = parts
        self.model = parts.model
        self._precision = precision
        self._scaling = _lora_scaling(self.model)
        fused = fuse(_plain_copy(self.model), precision, arithmetic=arithmetic, max_context=max_context)
        self._swapped = dict(_swapped(fused))
        self._loaders = _loaders_of(fused, self._swapped)
        self.guard = _ExactGuard(arithmetic=arithmetic)
        self.guard.know((named for named in self.model.named_parameters() if not is_adapter(named[0])), precision)
        for name, kernel in self._swapped.items():
            module = self.model.get_submodule(name)
            module.forward = _forward(module, kernel, precision.of(f"{name}.weight"))

    def guard_rows(self, run: Callable[[], object]) -> None:
        """Guard operations whose bits depend on other rows in the forward `run`, or raise if that is impossible."""
        guarded = guard_rows(self.model, self.guard, self.parts, run, name="model")
        for path, module in self._left_over(run):
            own = self._rounded_parameters(path, module)
            names = frozenset(name for name, parameter in own if not self.guard.has_multiplied(parameter))
            module.forward = _rounded_forward(module, self._precision.usual, names)
            if path in guarded:
                guard_forward(module, self.guard)

    def repack(self) -> None:
        state = self.model.state_dict()
        if self._scaling is not None:
            state = merged_state(state, self._scaling)
        with torch.inference_mode():
            for names, load in self._loaders:
                load(*(state[name].detach() if name else None for name in names))
        self.guard.forget()

    def _left_over(self, run: Callable[[], object]) -> Iterator[tuple[str, nn.Module]]:
        """Yield path and module of those without a kernel that must round their parameters."""
        if self._precision.usual == torch.float32:
            return
        with torch.inference_mode(), Reads() as reads:
            run()
        called = self.parts.anatomy.called
        for path, module in self.model.named_modules():
            inside = any(is_inside(path, swapped) for swapped in self._swapped)
            if inside or next(module.parameters(recurse=False), None) is None:
                continue
            own = self._rounded_parameters(path, module)
            vectors = [name for name, parameter in own if parameter.ndim < 2 and reads.has_read(parameter)]
            if path not in called and vectors:
                kept_as = str(self._precision.usual).removeprefix("torch.")
                problem = f"{path}.{vectors[0]} is read by code outside of its module, so exactOnPolicy is not possible"
                problem += f" with generation.dtype {kept_as}"
                raise UnsupportedModel("model", type(module).__name__, problem)
            yield path, module

    def _rounded_parameters(self, path: str, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        before = f"{path}." if path else ""
        own = module.named_parameters(recurse=False)
        return [(name, each) for name, each in own if self._precision.of(before + name) != torch.float32]


class _ExactGuard(Guard):
    def multiply(self, rows: Tensor, weight: Tensor, packed: PackedLinear) -> Tensor:
        return exact_linear(rows, weight, None, packed)


def _plain_copy(model: Any) -> Any:
    """Copy the model without LoRA, since only names and shapes matter."""
    plain = copy.deepcopy(model)
    for name, module in list(plain.named_modules()):
        if hasattr(module, "base_layer"):
            parent, _, leaf = name.rpartition(".")
            setattr(plain.get_submodule(parent), leaf, module.base_layer)
    return plain


def _swapped(fused: FusedModel) -> Iterator[tuple[str, nn.Module]]:
    inside = ""
    for name, module in fused.model.named_modules():
        if isinstance(module, _SWAPPED) and not (inside and name.startswith(inside)):
            inside = f"{name}."
            yield name, module


def _loaders_of(fused: FusedModel, swapped: dict[str, nn.Module]) -> list[Loader]:
    prefixes = tuple(f"{name}." for name, module in swapped.items() if not isinstance(module, RotaryTable))
    return [(names, load) for names, load in fused.loaders if names[0].startswith(prefixes)]


def _forward(module: Any, kernel: nn.Module, dtype: torch.dtype) -> Callable[..., Any]:
    match kernel:
        case PackedLinear():
            return lambda x: exact_linear(x, _weight(module), _bias(module), kernel)
        case PackedGatedMLP():
            return _gated_mlp_forward(module, kernel)
        case PackedExperts():
            return _experts_forward(module, kernel, dtype)
        case FusedRMSNorm():
            return _norm_forward(module, kernel, dtype)
        case RowInvariantActivation():
            return _activation_forward(kernel)
    assert isinstance(kernel, RotaryTable)
    return kernel.forward


def _gated_mlp_forward(module: Any, packed: PackedGatedMLP) -> Callable[..., Any]:
    parts = (module.gate_proj, module.up_proj, module.down_proj)

    def forward(x: Tensor) -> Tensor:
        gate, up, down = (_weight(part) for part in parts)
        return exact_gated_mlp(x, (gate, up, down), tuple(_bias(part) for part in parts), packed)

    return forward


def _experts_forward(experts: Any, packed: PackedExperts, dtype: torch.dtype) -> Callable[..., Any]:
    """Return a forward that runs `packed` experts, with gradients for the trained module's weights."""
    if isinstance(activation := getattr(packed.inner, "act_fn", None), RowInvariantActivation):
        experts.act_fn.forward = _activation_forward(activation)

    def layer(expert: int, rows: Tensor) -> Tensor:
        up, down, up_bias, down_bias = _expert_weights(experts, packed, expert, dtype)
        if packed.activation is not None:
            gate_weight, up_weight = up.chunk(2)
            biases = (None, None) if up_bias is None else up_bias.chunk(2)
            return exact_gated_mlp(rows, (gate_weight, up_weight, down), (*biases, down_bias), packed.mlps[expert])
        between = gate(experts, exact_linear(rows, up, up_bias, packed.ups[expert]))
        return exact_linear(between, down, down_bias, packed.downs[expert])

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return by_expert(hidden_states, top_k_index, top_k_weights, packed.num_experts, layer)

    return forward


def _expert_weights(
    experts: Any, packed: PackedExperts, expert: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    up, down, *biases = (getattr(experts, name)[expert] for name in packed.weight_names)
    up_bias, down_bias = (stored(bias, dtype) for bias in biases) if biases else (None, None)
    return oriented(packed, up), oriented(packed, down), up_bias, down_bias


def _activation_forward(kernel: RowInvariantActivation) -> Callable[..., Any]:
    return lambda x: exact(kernel, lambda tensor: activation_twin(tensor, kernel.name), x)


def _norm_forward(module: Any, norm: FusedRMSNorm, dtype: torch.dtype) -> Callable[..., Any]:
    def twin(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm_twin(x, stored(weight, dtype), norm.eps, add_one=norm.add_one)

    return lambda x: exact(lambda rows, _: norm(rows), twin, x, module.weight)


def _weight(layer: Any) -> Tensor:
    if not hasattr(layer, "base_layer"):
        weight: Tensor = layer.weight
        return weight.T if isinstance(layer, Conv1D) else weight
    with not_audited():  # weights only, no rows
        delta: Tensor = layer.lora_B[_ADAPTER].weight @ layer.lora_A[_ADAPTER].weight
    updated: Tensor = layer.base_layer.weight + layer.scaling[_ADAPTER] * delta
    return updated


def _bias(layer: Any) -> Tensor | None:
    return getattr(layer, "base_layer", layer).bias  # type: ignore[no-any-return]


def _lora_scaling(model: Any) -> float | None:
    """Return the adapters' scaling, or None without adapters. Raise for unsupported ones."""
    updated = [module for module in model.modules() if hasattr(module, "base_layer")]
    for module in updated:
        if type(module.base_layer) is not nn.Linear:
            kind = type(module.base_layer).__name__
            raise UnsupportedModel("model.lora", kind, "exactOnPolicy takes low-rank updates of linear layers only")
        if getattr(module.lora_dropout[_ADAPTER], "p", 0.0):
            raise InvalidRequest("model.lora.dropout", module.lora_dropout[_ADAPTER].p, "must be 0 with exactOnPolicy")
    return float(updated[0].scaling[_ADAPTER]) if updated else None


def _rounded_forward(module: nn.Module, dtype: torch.dtype, names: frozenset[str]) -> Callable[..., Any]:
    stand_in = copy.copy(module)
    stand_in._parameters = {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        for name, parameter in module._parameters.items():
            rounds = parameter is not None and name in names
            stand_in.__dict__[name] = stored(parameter, dtype) if rounds else parameter  # type: ignore[arg-type]
        return type(module).forward(stand_in, *args, **kwargs)

    return forward

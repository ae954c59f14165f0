"""MLPs that keep two of four arrays give the same gradients to the bit."""

import weakref
from typing import Any

import pytest
import torch
from learners import same_weights
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaMLP

from rlhfspec.tiny import random_model
from rlhfspec.training.modeling.gated import keep_all_of_mlps, keep_less_of_mlps

X = torch.randn(1, 300, 32, generator=torch.Generator().manual_seed(0))
INNER = 80


class Scaled(LlamaMLP):
    """MLP with the parts of a gated one that computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)  # type: ignore[no-any-return, no-untyped-call]


def mlp(kind: type[LlamaMLP] = LlamaMLP) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = random_model("llama", seed=1)
    config = model.config
    config.hidden_size, config.intermediate_size, config.hidden_act = 32, INNER, "gelu_pytorch_tanh"
    return kind(config)  # type: ignore[no-untyped-call]


def learnt(module: nn.Module) -> dict[str, torch.Tensor]:
    module.zero_grad()
    x = X.clone().requires_grad_()
    module(x).square().sum().backward()
    assert x.grad is not None
    return {"x": x.grad} | {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


class Made(TorchDispatchMode):
    """Storages of all results, for as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        storage = result.untyped_storage()
        self.storages[storage._cdata] = weakref.ref(storage)
        return result


def arrays_kept(module: nn.Module) -> int:
    with Made() as made:
        out = module(X)
    alive = [storage for reference in made.storages.values() if (storage := reference()) is not None]
    return sum(storage.nbytes() == INNER * X.shape[1] * 4 for storage in alive) if out.requires_grad else 0


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_have_the_same_bits(autocast: bool) -> None:
    module = mlp()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        kept = learnt(module)
        keep_less_of_mlps(module)
        assert "forward" in vars(module)
        same_weights(learnt(module), kept, tolerance=0.0)


def test_two_arrays_of_four_are_kept() -> None:
    module = mlp()
    assert arrays_kept(module) == 4
    keep_less_of_mlps(module)
    assert arrays_kept(module) == 2
    keep_all_of_mlps(module)
    assert arrays_kept(module) == 4


def test_frozen_mlps_learn_the_same_gradient_of_their_input() -> None:
    kept = learnt(module := mlp().requires_grad_(False))
    keep_less_of_mlps(module)
    same_weights(learnt(module), kept, tolerance=0.0)


def test_other_mlps_are_left_alone() -> None:
    module = mlp(Scaled)
    keep_less_of_mlps(module)
    assert "forward" not in vars(module)

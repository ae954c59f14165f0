"""Norms, MLPs and attention that keep fewer arrays give the same gradients to the bit."""

import pytest
import torch
from learners import same_weights
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from rlhfspec.huggingface.structure.attention import AttentionSpec
from rlhfspec.tiny import random_model
from rlhfspec.training.modeling.lean import keep_less, whole_layers
from rlhfspec.training.modeling.one_call import RowPart
from rlhfspec.training.modeling.packed import row_attention
from rlhfspec.training.modeling.recomputed import bytes_kept

X = torch.randn(1, 300, 32, generator=torch.Generator().manual_seed(0))
INNER = 80
SPEC = AttentionSpec(
    index=0, num_heads=2, num_kv_heads=2, key_dim=8, value_dim=8, scale=0.3, softcap=0.0, has_sinks=False, window=None,
    chunk=None,
)  # fmt: skip


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


def arrays_kept(module: nn.Module) -> int:
    return bytes_kept(lambda: module(X)) // (INNER * X.shape[1] * 4)


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_have_the_same_bits(autocast: bool) -> None:
    module = mlp()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        kept = learnt(module)
        keep_less(module)
        assert "forward" in vars(module)
        same_weights(learnt(module), kept, tolerance=0.0)


def test_two_arrays_of_four_are_kept() -> None:
    module = mlp()
    assert arrays_kept(module) == 4
    keep_less(module)
    assert arrays_kept(module) == 2
    with whole_layers():
        assert arrays_kept(module) == 4


def test_frozen_mlps_learn_the_same_gradient_of_their_input() -> None:
    kept = learnt(module := mlp().requires_grad_(False))
    keep_less(module)
    same_weights(learnt(module), kept, tolerance=0.0)


def test_other_mlps_are_left_alone() -> None:
    module = mlp(Scaled)
    keep_less(module)
    assert "forward" not in vars(module)


def test_norms_keep_their_input_alone() -> None:
    norm = LlamaRMSNorm(32)
    kept = learnt(norm)
    x = X.clone().requires_grad_() * 1.0
    whole = bytes_kept(lambda: norm(x)) // x.nbytes
    keep_less(norm)
    assert (whole, bytes_kept(lambda: norm(x)) // x.nbytes) == (2, 1), "the normed input, and the result"
    same_weights(learnt(norm), kept, tolerance=0.0)


def test_answers_do_not_keep_the_keys_of_their_prompt() -> None:
    q, k, v = (torch.randn(1, 2, 460, 8, requires_grad=True) for _ in "qkv")
    parts = (RowPart(400), *(RowPart(10, 0) for _ in range(6)))

    def run() -> torch.Tensor:
        return row_attention(q, k, v, parts, SPEC, 0.3, 0.0, None)

    def gradients() -> dict[str, torch.Tensor]:
        return dict(zip("qkv", torch.autograd.grad(run().square().sum(), (q, k, v)), strict=True))

    less, found = bytes_kept(run), gradients()
    with whole_layers():
        assert less < bytes_kept(run) - 6 * 2 * 400 * 2 * 8 * 4
        same_weights(gradients(), found, tolerance=0.0)

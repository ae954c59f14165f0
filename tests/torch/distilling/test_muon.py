"""Muon equals torch's own, its slow twin, on CPUs without bfloat16."""

import pytest
import torch

from rlhfspec.engine.distilling.muon import Muon


@pytest.mark.parametrize("like_adamw", [False, True])
@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (32, 32)])
def test_it_steps_as_torchs_does_but_for_bfloat16(shape: tuple[int, int], like_adamw: bool) -> None:
    torch.manual_seed(3)
    ours = torch.nn.Parameter(torch.randn(shape))
    theirs = torch.nn.Parameter(ours.detach().clone())
    adjusted = "match_rms_adamw" if like_adamw else "original"
    mine = Muon([ours], 0.02, momentum=0.9, weight_decay=0.1, like_adamw=like_adamw)
    twin = torch.optim.Muon([theirs], lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn=adjusted)
    for _ in range(4):
        before = ours.detach().clone()
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for optimizer in (mine, twin):
            optimizer.step()
        moved = (ours - before).norm()
        assert (ours - theirs).norm() < 0.02 * moved
        assert moved > 0
        theirs.data.copy_(ours.data)


def test_a_matrix_without_a_gradient_stays() -> None:
    matrix = torch.nn.Parameter(torch.ones(3, 3))
    Muon([matrix], 0.1).step()
    assert torch.equal(matrix, torch.ones(3, 3))

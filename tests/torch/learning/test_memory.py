from typing import Any

import pytest
import torch
from learners import policy, spec

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.tiny import random_model
from rlhfspec.training.learning.memory import ActivationRoom, fits_into
from rlhfspec.training.modeling.loading import prepared
from rlhfspec.training.modeling.recomputed import activation_bytes

GPU = torch.device("cuda")


def settled(monkeypatch: pytest.MonkeyPatch, free: int, *, setting: str = "auto", device: torch.device = GPU,
            model: Any = None) -> bool:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
    model = policy() if model is None else model
    settings = spec(activationCheckpointing=setting, tokensPerMicroBatch=4096)
    return ActivationRoom(settings, [model.model], device, torch.float32).settle(model.parameters(), Ranks())


def test_a_device_computes_layers_again_where_a_micro_batch_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy()
    needed, trained = activation_bytes(model.model, 4096), sum(p.nbytes for p in model.parameters())
    enough = next(free for free in range(1 << 30, 1 << 34, 1 << 20) if fits_into(free, trained) >= needed)
    assert not settled(monkeypatch, enough)
    assert settled(monkeypatch, enough - (1 << 20))


def test_a_cpu_keeps_activations_unless_the_job_sets_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not settled(monkeypatch, 0, device=torch.device("cpu"))
    assert settled(monkeypatch, 1 << 40, setting="on", device=torch.device("cpu"))
    assert not settled(monkeypatch, 0, setting="off")


def test_scores_that_are_written_out_never_count_as_fitting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settled(monkeypatch, 1 << 40, model=prepared(random_model("gemma2", seed=1)))

"""States of a small training, as checkpoints keep them."""

from typing import Any

import torch


def state(step: int) -> dict[str, Any]:
    weight = torch.full((64, 64), float(step))
    return {"step": step, "policy": {"weight": weight}, "optimizer": {"state": {0: {"step": torch.tensor(step)}}}}


def check(loaded: Any, step: int) -> None:
    assert loaded["step"] == step
    assert torch.equal(loaded["policy"]["weight"], torch.full((64, 64), float(step)))
    assert loaded["optimizer"]["state"][0]["step"].item() == step

"""The worst drafter: random weights in every step, without effect on tokens."""

from typing import Any

import numpy as np
import torch

from rlhfspec.engine import Engine


def noisy(engine: Engine, rng: np.random.Generator) -> Engine:
    genuine, draft = engine.step, engine.state.draft
    held = engine.state.student.state_dict()
    scales = {name: float(tensor.float().std()) or 1.0 for name, tensor in held.items()}

    def step() -> Any:
        noise = {n: torch.from_numpy(rng.normal(0, scales[n], t.shape)).to(t.dtype) for n, t in held.items()}
        draft.runner.load_weights(noise)
        engine.check_integrity()
        return genuine()

    engine.step = step  # type: ignore[method-assign]
    return engine

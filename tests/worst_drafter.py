"""The worst drafter: an EAGLE-3 head with random weights in every step, without effect on tokens."""

from typing import Any

import numpy as np
import torch

from rlhfspec.engine import Engine


def noisy(engine: Engine, rng: np.random.Generator) -> Engine:
    genuine = engine.step
    held = {name: tensor for name, tensor in engine.state.student.state_dict().items() if tensor.is_floating_point()}
    scales = {name: float(tensor.std()) or 1.0 for name, tensor in held.items()}

    def step() -> Any:
        noise = {n: torch.from_numpy(rng.normal(0, scales[n], t.shape)).to(t.dtype) for n, t in held.items()}
        engine.state.eagle.load_weights(noise)
        engine.check_integrity()
        return genuine()

    engine.step = step  # type: ignore[method-assign]
    return engine

"""Measure the time to load a model: `python bench/loading.py`.

Prints medians for the tiny models: from folder to engine, and the part that examines the model, installs kernels and
proves them right.
"""

from __future__ import annotations

import statistics
import time

import torch

from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.huggingface.loading import load_model
from rlhfspec.tiny.models import ensure

MODELS = (("sums", "float32"), ("target", "float32"), ("wide", "float32"), ("wide", "bfloat16"))
NUM_TURNS = 5


def main() -> None:
    torch.set_num_threads(2)
    paths = ensure(*{name for name, _ in MODELS})
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in MODELS}
    for _ in range(NUM_TURNS):
        for name, dtype in MODELS:
            began = time.perf_counter()
            config = EngineConfig(dtype=dtype, profile=False, max_context=512, speculation="off")
            engine = make_engine(load_model(getattr(paths, name)), config)
            seconds[name, dtype].append((time.perf_counter() - began, engine.reports["model"].seconds))
    print(f"{'model':20} {'load, s':>8} {'our part':>9}")
    for (name, dtype), turns in seconds.items():
        whole, ours = (statistics.median(part) for part in zip(*turns, strict=True))
        print(f"{name + ' ' + dtype:20} {whole:8.2f} {ours:9.2f}")


if __name__ == "__main__":
    main()

"""Settings every test runs with. They must be in place before torch, triton or matplotlib are imported."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not Path("/dev/nvidia0").exists():  # without a GPU, Triton kernels run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings

# Deterministic examples and no per-example deadline: a busy machine must not fail a correct test.
settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("default")

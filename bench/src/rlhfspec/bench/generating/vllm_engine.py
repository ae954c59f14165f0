"""Benchmark worker for the engine `vllm`: a vLLM process with rlhfspec's sampling (docs/law.md).

python -m rlhfspec.bench.generating.vllm_engine PYTHON_WITH_VLLM
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from rlhfspec.bench.generating.ours import accepted_per_verification, requests_of
from rlhfspec.bench.rivals.serve import serve
from rlhfspec.bench.worker import environment
from rlhfspec.engine.base import Completion
from rlhfspec.engine.vllm.client import VllmEngine
from rlhfspec.engine.vllm.process import VllmProcess


def opened(
    model: str, python: Path, *, max_context: int, max_sequences: int, dtype: str, num_threads: int
) -> VllmEngine:  # fmt: skip
    """Start the engine `vllm` without drafts and prefix caching, as `vllm_worker.py` starts vLLM."""
    arguments = {
        "model": model, "skip_tokenizer_init": True, "dtype": dtype, "max_model_len": max_context,
        "max_num_seqs": max_sequences, "enforce_eager": True, "enable_prefix_caching": False, "async_scheduling": False,
        "worker_cls": "rlhfspec.engine.vllm.inside.worker.LawWorker", "generation_config": "vllm", "seed": 0,
    }  # fmt: skip
    orders: dict[str, dict[str, Any]] = {
        "open": {"device": "cpu", "arguments": arguments, "field_of": {}},
        "trial": {"model": model, "dtype": dtype, "compares": False},
    }
    child = VllmProcess(python, orders, environment(num_threads) | {"HF_HUB_OFFLINE": "1"})
    return VllmEngine(
        child, child.start(), max_context=max_context, max_sequences=max_sequences, step_seconds=600.0
    )  # fmt: skip


class VllmWorker:
    def __init__(self, python: Path) -> None:
        self._python = python
        self._engine: Any = None
        self._num_runs = 0

    def load(self, arguments: dict[str, Any]) -> dict[str, Any]:
        names = ("max_context", "max_sequences", "dtype", "num_threads")
        self._engine = opened(arguments["target"], self._python, **{name: arguments[name] for name in names})
        return {"loaded": {}}

    def run(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self._num_runs += 1
        began = time.perf_counter()
        for request in requests_of(arguments, name=f"run-{self._num_runs}"):
            self._engine.submit(request)
        done: list[Completion] = []
        while self._engine.has_work:
            done += self._engine.step().finished
        return {
            "seconds": time.perf_counter() - began,
            "num_tokens": sum(len(each.token_ids) for each in done),
            "accepted_per_verification": accepted_per_verification(done),
        }


if __name__ == "__main__":
    worker = VllmWorker(Path(sys.argv[1]))
    serve({"load": worker.load, "run": worker.run})

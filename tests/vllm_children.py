"""vLLM child processes shared by tests: one per drafting mode, with new weights per engine."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rlhfspec.engine.forward.models import eos_token_ids
from rlhfspec.engine.vllm.client import VllmEngine
from rlhfspec.engine.vllm.finding import INSTALL_VLLM, find_python
from rlhfspec.engine.vllm.from_job import NO_DRAFTS, drafts_right
from rlhfspec.engine.vllm.process import VllmProcess

NEEDED = "RLHFSPEC_TESTS_NEED_VLLM"  # in the environment of `make test-vllm`: without vLLM its tests fail
STEP_SECONDS = 120.0


def python_with_vllm() -> Path:
    if not os.environ.get(NEEDED):
        pytest.skip("with vLLM: make test-vllm")
    python = find_python(None)
    assert python is not None, INSTALL_VLLM
    return python


class Children:
    def __init__(
        self, model: Any, drafter: Any, *, max_context: int, max_sequences: int,
        environment: dict[str, str] | None = None, **arguments: Any,
    ) -> None:  # fmt: skip
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-tests-")
        self.path, drafter_path = (str(Path(self._folder.name) / name) for name in ("model", "drafter"))
        model.save_pretrained(self.path)
        if isinstance(drafter, Path):
            drafter_path = str(drafter)
        else:
            drafter.save_pretrained(drafter_path)
        self._speculation = {
            "off": None,
            "ngram": {
                "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1,
            },
            **{
                method: {"method": method, "model": drafter_path, "num_speculative_tokens": 4}
                for method in ("draft_model", "eagle3")
            },
        }  # fmt: skip
        self._environment = environment or {}
        self._max_context, self._max_sequences, self._arguments = max_context, max_sequences, arguments
        self._running: dict[str, tuple[VllmProcess, dict[str, Any]]] = {}

    def orders(self, mode: str) -> dict[str, dict[str, Any]]:
        block_size = self._arguments.get("block_size", 32)
        arguments = {
            "model": self.path, "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": self._max_context,
            "max_num_seqs": self._max_sequences, "block_size": block_size, "enforce_eager": True, "seed": 0,
            "num_gpu_blocks_override": self._max_sequences * -(-self._max_context // block_size) + 1,
            "worker_cls": "rlhfspec.engine.vllm.inside.worker.LawWorker", "async_scheduling": False,
            "generation_config": "vllm", "speculative_config": self._speculation[mode], **self._arguments,
        }  # fmt: skip
        return {
            "open": {"device": "cpu", "arguments": arguments, "field_of": {}},
            "trial": {"model": self.path, "dtype": "float32", "compares": True},
        }

    def child(self, mode: str) -> tuple[VllmProcess, dict[str, Any]]:
        if mode not in self._running:
            if mode != "off" and not drafts_right("cpu"):
                pytest.skip(NO_DRAFTS)
            child = VllmProcess(python_with_vllm(), self.orders(mode), {"HF_HUB_OFFLINE": "1"} | self._environment)
            self._running[mode] = child, child.start()
        child, opened = self._running[mode]
        if child.pid is None:
            child.start()
        assert not opened["problems"]
        return child, opened

    def engine(self, mode: str, model: Any, tokenizer: Any = None, *, ahead_seconds: float = 0.0) -> VllmEngine:
        """Return an engine as if opened with this model. The last engine of a mode has the child."""
        child, opened = self.child(mode)
        opened = opened | {"eos_token_ids": eos_token_ids(model)}
        engine = VllmEngine(
            child, opened, max_context=self._max_context, max_sequences=self._max_sequences,
            step_seconds=STEP_SECONDS, ahead_seconds=ahead_seconds, strategy=mode, tokenizer=tokenizer,
        )  # fmt: skip
        engine._weights.write(dict(model.named_parameters()), 0)  # each once, as the trainer names them
        child.ask("begin", {"weights": engine._weights.path}, seconds=STEP_SECONDS)
        return engine

    def close(self) -> None:
        for child, _ in self._running.values():
            child.close()
        self._folder.cleanup()

"""The law in vLLM's V2 runner, the GPU default, with interpreted Triton kernels on a CPU."""

import copy
import dataclasses
from pathlib import Path

import pytest
from vllm_children import Children

from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.loading import make_engine
from rlhfspec.testing.engine import PROMPTS, reference, request, run
from rlhfspec.tiny import perturbed

pytestmark = pytest.mark.timeout(900)  # a child is 12 s of a processor until it is there
INTERPRETED = """
import os, types
import triton.backends

class Driver:
    @staticmethod
    def is_active():
        return True

triton.backends.backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)
"""


@pytest.mark.parametrize("mode", ["off", "draft_model"])
def test_tokens_are_our_engines(mode: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERPRETED)
    runner = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": str(tmp_path)}
    asked = [request(f"r{seed}", prompt, seed=seed, max_tokens=12) for seed, prompt in enumerate(PROMPTS)]
    asked[1] = dataclasses.replace(asked[1], params=dataclasses.replace(asked[1].params, top_k=9, top_p=0.9))
    config = EngineConfig(max_sequences=4, max_context=96, profile=False, num_threads=1, speculation="off")
    wanted = run(make_engine(copy.deepcopy(reference()), config), *asked)
    children = Children(
        reference(), perturbed(reference(), 0.1), max_context=96, max_sequences=4, environment=runner
    )  # fmt: skip
    try:
        done = run(children.engine(mode, reference()), *asked)
    finally:
        children.close()
    assert {name: each.token_ids for name, each in done.items()} == {
        name: each.token_ids for name, each in wanted.items()
    }
    assert (sum(each.stats.num_accepted for each in done.values()) > 0) == (mode != "off")

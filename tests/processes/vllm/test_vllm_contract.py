from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from vllm_children import Children

from rlhfspec.engine.vllm.client import AHEAD_SECONDS, VllmEngine
from rlhfspec.testing.engine import EngineContract, reference
from rlhfspec.tiny import perturbed
from rlhfspec.tiny.tokenizer import hugging_face_tokenizer

pytestmark = pytest.mark.timeout(900)  # a child is 12 s of a processor until it is there


@pytest.fixture(scope="module", autouse=True)
def _children() -> Iterator[None]:
    children = Children(reference(), perturbed(reference(), 0.1), max_context=96, max_sequences=8)
    TestVllm.children = children
    yield
    children.close()


class TestVllm(EngineContract):
    modes = ("off", "draft_model")
    children: ClassVar[Children]

    def make(self, model: Any, mode: Any) -> VllmEngine:
        ahead_seconds = AHEAD_SECONDS if mode == "off" else 0.0
        return self.children.engine(mode, model, hugging_face_tokenizer(), ahead_seconds=ahead_seconds)

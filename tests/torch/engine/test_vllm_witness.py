from typing import Any

import numpy as np
import pytest
import torch

from rlhfspec.engine.vllm.inside.witness import Witness
from rlhfspec.kernels import gumbel

NUM_ROWS, NUM_TOKENS = 16, 64
TEMPERATURE, TOP_K, TOP_P = 2.0, 50, 0.9  # of the trial


def parameters() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    return {
        "logits": torch.from_numpy(draw.normal(0, 3, (NUM_ROWS, NUM_TOKENS)).astype(np.float32)),
        "seeds": np.arange(NUM_ROWS, dtype=np.uint64) << np.uint64(40),
        "places": np.arange(NUM_ROWS, dtype=np.int32),
        "temperatures": np.full(NUM_ROWS, TEMPERATURE, np.float32),
        "top_k": np.full(NUM_ROWS, TOP_K, np.int32),
        "top_p": np.full(NUM_ROWS, TOP_P, np.float32),
    }


def problems(drawn: Any) -> list[str]:
    witness = Witness()
    witness.is_watching = True
    logits, *others = parameters().values()
    witness.saw(logits, drawn, *others)
    return witness.problems()


def test_the_witness_accepts_the_law() -> None:
    assert problems(gumbel.sample(*parameters().values())) == []


def masked_before_the_temperature(of: dict[str, Any]) -> dict[str, Any]:
    order = of["logits"].sort(-1, descending=True)
    behind = order.values.softmax(-1).cumsum(-1) - order.values.softmax(-1)
    is_kept = (behind < TOP_P) & (torch.arange(NUM_TOKENS) < TOP_K)
    is_kept = torch.zeros_like(is_kept).scatter(-1, order.indices, is_kept)
    nothing = {"top_k": np.zeros_like(of["top_k"]), "top_p": np.ones_like(of["top_p"])}
    return of | nothing | {"logits": of["logits"].masked_fill(~is_kept, -1e30)}


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (masked_before_the_temperature, "tempered log-prob"),
        (lambda of: of | {"seeds": of["seeds"] + np.uint64(1)}, "is not the expected one"),
        (lambda of: of | {"places": of["places"] + np.int32(1)}, "is not the expected one"),
        (lambda of: of | {"temperatures": of["temperatures"] / np.float32(1.1)}, "tempered log-prob"),
        (lambda of: of | {"top_k": np.full(NUM_ROWS, 5, np.int32)}, "tempered log-prob"),
    ],
)
def test_the_witness_detects_a_wrong_law(wrong: Any, word: str) -> None:
    found = problems(gumbel.sample(*wrong(parameters()).values()))
    assert any(word in each for each in found), found


def test_the_witness_detects_wrong_log_probs() -> None:
    drawn = gumbel.sample(*parameters().values())
    assert len(problems(drawn._replace(log_probs=drawn.log_probs + 1e-3))) == NUM_ROWS

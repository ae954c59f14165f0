"""Samples of vLLM in bfloat16 follow the model's distribution, by chi-square."""

import copy

import numpy as np
import pytest
import torch
from vllm_children import Children

from rlhfspec.testing.engine import PROMPTS, reference, request, run

pytestmark = pytest.mark.timeout(900)  # a child is 12 s of a processor until it is there

NUM_SAMPLES = 3000
LEAST_EXPECTED = 8.0  # in a cell; rarer tokens share one


def test_one_token_of_many_seeds_has_the_distribution_of_the_model() -> None:
    children = Children(reference(), reference(), max_context=96, max_sequences=64, dtype="bfloat16")
    model = copy.deepcopy(reference()).to(torch.bfloat16)
    try:
        asked = [request(f"r{seed}", PROMPTS[3], seed=seed, max_tokens=1) for seed in range(NUM_SAMPLES)]
        done = run(children.engine("off", model), *asked)
    finally:
        children.close()
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([PROMPTS[3]]), use_cache=False).logits[0, -1]
    expected = NUM_SAMPLES * logits.double().softmax(-1).numpy()
    observed = np.bincount([each.token_ids[0] for each in done.values()], minlength=len(expected)).astype(float)
    often = expected >= LEAST_EXPECTED
    cells = [(observed[often], expected[often]), (observed[~often].sum(), expected[~often].sum())]
    chi_square = sum(float(np.sum((found - wanted) ** 2 / wanted)) for found, wanted in cells)
    freedom = int(often.sum())
    assert freedom > 10
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom), f"{chi_square:.0f} of {freedom} degrees of freedom"

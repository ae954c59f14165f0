"""Tokens of vLLM under the law are our engine's in all families and runners; in bfloat16 they follow the model."""

import copy
import dataclasses
import random
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm_children import Children

from rlhfspec.engine import Completion, Request, oracle
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.vllm.from_job import drafts_right
from rlhfspec.testing.engine import NEAR_TIE, PROMPTS, reference, request, run
from rlhfspec.tiny import perturbed, random_model

pytestmark = pytest.mark.timeout(900)  # a child is 12 s of a processor until it is there

FAMILIES = ("llama-tied", "qwen2", "qwen3", "mistral", "gemma", "phi3")
NUM_REQUESTS, NUM_TOKENS = 14, 64
MOST_TIES = 1e-4  # of the tokens, in float32


def requests(vocabulary: int) -> list[Request]:
    draw = random.Random(1)
    found = []
    for index in range(NUM_REQUESTS):
        prompt = tuple(draw.randrange(3, vocabulary) for _ in range(draw.randrange(4, 60)))
        masks = {"top_k": 9, "top_p": 0.9} if index % 3 == 2 else {}
        temperature = (1.0, 0.7, 1.3, 0.0)[index % 4]
        seed = draw.randrange(1 << 64)
        found.append(request(f"r{index}", prompt, seed=seed, max_tokens=NUM_TOKENS, temperature=temperature, **masks))
    return found


def first_other(ours: Completion, theirs: Completion) -> int | None:
    pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), None)


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_gives_the_tokens_of_our_engine(family: str) -> None:
    """Only near-ties, which the slow decoder finds, may differ."""
    model = random_model(family, seed=5, head_dim=32)
    asked = requests(model.config.vocab_size)
    config = EngineConfig(max_sequences=16, max_context=160, profile=False, num_threads=1, speculation="off")
    ours = run(make_engine(copy.deepcopy(model), config), *asked)
    mode = "ngram" if drafts_right("cpu") else "off"
    with closing(Children(perturbed(model, 1.0), model, max_context=160, max_sequences=16)) as children:
        theirs = run(children.engine(mode, model), *asked)
    ties = 0
    for each in asked:
        one, other = ours[each.id], theirs[each.id]
        at = first_other(one, other)
        if at is not None:
            prompt = [*each.prompt_token_ids]
            margin = oracle.decode(model, prompt, each.params, each.seed, forced=[*one.token_ids[: at + 1]]).margins[at]
            assert margin < NEAR_TIE, f"{family} {each.id}: another token at {at}, by {margin}"
            ties += 1
        same = len(one.token_ids) if at is None else at
        np.testing.assert_allclose(one.log_probs[:same], other.log_probs[:same], atol=3e-5)
        np.testing.assert_allclose(one.tempered_log_probs[:same], other.tempered_log_probs[:same], atol=3e-5)
    num_tokens = sum(len(each.token_ids) for each in theirs.values())
    assert num_tokens == NUM_REQUESTS * NUM_TOKENS
    assert ties <= MOST_TIES * num_tokens
    assert mode == "off" or sum(each.stats.num_accepted for each in theirs.values()) > 0, "n-grams are accepted"
    print(f"{family}: {num_tokens} tokens, {ties} other")


NUM_SAMPLES = 3000
LEAST_EXPECTED = 8.0  # in a cell; rarer tokens share one


def test_one_token_of_many_seeds_has_the_distribution_of_the_model() -> None:
    children = Children(reference(), reference(), max_context=96, max_sequences=64, dtype="bfloat16")
    model = copy.deepcopy(reference()).to(torch.bfloat16)
    with closing(children):
        asked = [request(f"r{seed}", PROMPTS[3], seed=seed, max_tokens=1) for seed in range(NUM_SAMPLES)]
        done = run(children.engine("off", model), *asked)
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
def test_the_gpu_runner_of_vllm_gives_the_tokens_of_our_engine(mode: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERPRETED)
    runner = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": str(tmp_path)}
    asked = [request(f"r{seed}", prompt, seed=seed, max_tokens=12) for seed, prompt in enumerate(PROMPTS)]
    asked[1] = dataclasses.replace(asked[1], params=dataclasses.replace(asked[1].params, top_k=9, top_p=0.9))
    config = EngineConfig(max_sequences=4, max_context=96, profile=False, num_threads=1, speculation="off")
    wanted = run(make_engine(copy.deepcopy(reference()), config), *asked)
    children = Children(
        reference(), perturbed(reference(), 0.1), max_context=96, max_sequences=4, environment=runner
    )  # fmt: skip
    with closing(children):
        done = run(children.engine(mode, reference()), *asked)
    assert {n: x.token_ids for n, x in done.items()} == {n: x.token_ids for n, x in wanted.items()}
    assert (sum(each.stats.num_accepted for each in done.values()) > 0) == (mode != "off")

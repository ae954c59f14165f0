"""Tokens of vLLM under the law equal our engine's over model families, after a full weight swap."""

import copy
import random

import numpy as np
import pytest
from vllm_children import Children

from rlhfspec.engine import oracle
from rlhfspec.engine.base import Completion, Request
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.loading import make_engine
from rlhfspec.engine.vllm.from_job import drafts_right
from rlhfspec.testing.engine import NEAR_TIE, request, run
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
def test_tokens_are_our_engines(family: str) -> None:
    """Only near-ties, which the slow decoder finds, may differ."""
    model = random_model(family, seed=5, head_dim=32)
    asked = requests(model.config.vocab_size)
    config = EngineConfig(max_sequences=16, max_context=160, profile=False, num_threads=1, speculation="off")
    ours = run(make_engine(copy.deepcopy(model), config), *asked)
    mode = "ngram" if drafts_right("cpu") else "off"
    children = Children(perturbed(model, 1.0), model, max_context=160, max_sequences=16)
    try:
        theirs = run(children.engine(mode, model), *asked)
    finally:
        children.close()
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

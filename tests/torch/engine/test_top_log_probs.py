"""The best tokens at each position, against Hugging Face's forward."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from moving import PROMPT, SUFFIX, TREE, make, model, request

from rlhfspec.engine.base import TopLogProbs
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.errors import InvalidRequest
from rlhfspec.kernels.gumbel import kept_tokens


def reported(speculation: str | DraftPlan, **params: Any) -> tuple[list[int], list[float], list[TopLogProbs]]:
    engine = make(speculation=speculation)
    engine.submit(replace(request("asks", **params), top_log_probs=5))
    engine.submit(request("does not ask", seed=8))
    tokens, tempered, top = [], [], []
    while engine.has_work:
        for gain in engine.step().gains:
            if gain.id == "asks":
                tokens += gain.token_ids.tolist()
                tempered += gain.tempered_log_probs.tolist()
                top += gain.top_log_probs
            else:
                assert gain.top_log_probs == ()
    return tokens, tempered, top


@pytest.mark.parametrize("speculation", ["off", TREE, SUFFIX])
@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.7, "top_k": 3}, {"temperature": 1.3, "top_p": 0.4}, {"temperature": 0.0}],
    ids=["plain", "top_k", "top_p", "greedy"],
)
def test_the_best_tokens_are_those_of_the_distribution_sampled_from(
    speculation: str | DraftPlan, params: dict[str, float]
) -> None:
    tokens, tempered, top = reported(speculation, **params)
    assert len(top) == len(tokens)
    with torch.no_grad():
        logits = model()(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1].double()
    temperature, one = params.get("temperature", 1.0), torch.ones(len(tokens))
    if temperature == 0:
        assert top == [((token, 0.0),) for token in tokens]
        return
    top_k, top_p = (one * params.get("top_k", 0)).int(), one * params.get("top_p", 1.0)
    mask = kept_tokens(logits, one * temperature, top_k, top_p)
    values, ids = (logits / temperature).masked_fill(~mask, -torch.inf).log_softmax(1).topk(5)
    for place, best in enumerate(top):
        kept = values[place] > -torch.inf
        assert [token for token, _ in best] == ids[place][kept].tolist()
        assert [value for _, value in best] == pytest.approx(values[place][kept].tolist(), abs=1e-4)
        if tokens[place] in dict(best):
            assert dict(best)[tokens[place]] == pytest.approx(tempered[place], abs=1e-5)
    assert reported("off", **params) == (tokens, tempered, top)


def test_too_many_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="top_log_probs: must be a whole number from 0 to 20"):
        make().submit(replace(request("x"), top_log_probs=21))

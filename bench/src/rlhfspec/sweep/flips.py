"""Count of tokens by which an engine on a device differs from the exact oracle, or from itself in other batches.

Two engines run the same requests on the device: one by one without drafts, and together with suffix drafts. The oracle
(`rlhfspec.engine.oracle`) then runs plain Hugging Face on the CPU in float32, with weights rounded as the engine's. A
flip is a token that the oracle would not have chosen after the same tokens; rounding flips close scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlhfspec.engine import oracle
from rlhfspec.engine.base import Request
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import Engine, make_engine
from rlhfspec.engine.params import SamplingParams
from rlhfspec.errors import InvalidRequest
from rlhfspec.huggingface.fused.casting import precision_of, round_parameters
from rlhfspec.huggingface.structure.attention import use_eager_experts
from rlhfspec.sweep.ways import one_by_one, together

_PROMPT_LENGTHS = (5, 37, 2, 70)
_TEMPERATURES = (1.0, 0.7, 1.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flips:
    """Counts of flipped tokens and differing samples.

    >>> print(Flips(num_tokens=256, num_flips=2, lead=0.0031, num_sequences=4, num_parted=1))
    2 of 256 tokens are not the oracle's, which led by 3.1e-03 at most; 1 of 4 samples parts from itself in company
    """

    num_tokens: int
    num_flips: int  # tokens that are not the oracle's
    lead: float  # of the oracle's token there, the largest
    num_sequences: int
    num_parted: int  # other tokens one by one than together with drafts

    def __str__(self) -> str:
        led = f", which led by {self.lead:.1e} at most" if self.num_flips else ""
        parts = "parts" if self.num_parted == 1 else "part"
        return (
            f"{self.num_flips} of {self.num_tokens} tokens are not the oracle's{led}; "
            f"{self.num_parted} of {self.num_sequences} samples {parts} from itself in company"
        )


def check_device(device: str) -> None:
    """Raise InvalidRequest if torch does not have the device here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidRequest("--device", device, f"is not here: {str(error).splitlines()[0]}") from None


def count_flips(
    make: Callable[[], Any], device: str, *, dtype: str, exact: str, max_context: int, max_tokens: int = 64
) -> Flips:
    """Count flipped tokens and differing samples on `device`; `make` returns a new model on each call."""
    room: dict[str, Any] = {"max_sequences": len(_PROMPT_LENGTHS), "max_context": max_context, "profile": False}
    room |= {"kv_cache_tokens": max_context + 1024, "device": device, "dtype": dtype, "exact": exact}
    engine = make_engine(make(), EngineConfig(speculation="off", **room))
    requests = list(_requests(engine, max_context, max_tokens))
    alone = one_by_one(engine, requests)
    del engine
    found = together(make_engine(make(), EngineConfig(speculation="suffix", **room)), requests)
    leads, num_tokens, model = list[float](), 0, _plain(make(), dtype)
    for request in requests:
        ours = list(found[request.id].token_ids)
        theirs = oracle.decode(model, list(request.prompt_token_ids), request.params, request.seed, forced=ours)
        flipped = zip(ours, theirs.token_ids, theirs.margins, strict=True)
        leads += [lead for our_token, token, lead in flipped if our_token != token]
        num_tokens += len(ours)
    num_parted = sum(found[name].token_ids != sample.token_ids for name, sample in alone.items())
    return Flips(
        num_tokens=num_tokens, num_flips=len(leads), lead=max(leads, default=0.0),
        num_sequences=len(requests), num_parted=num_parted,
    )  # fmt: skip


def _requests(engine: Engine, max_context: int, max_tokens: int) -> Iterator[Request]:
    draw = np.random.default_rng(0)
    num_ids, max_tokens = engine.state.target.runner.num_token_ids, min(max_tokens, max_context // 2)
    for index, (length, temperature) in enumerate(zip(_PROMPT_LENGTHS, _TEMPERATURES, strict=True)):
        prompt = tuple(draw.integers(0, num_ids, min(length, max_context - max_tokens)).tolist())
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
        yield Request(id=f"r{index}", prompt_token_ids=prompt, params=params, seed=11 + index)


def _plain(model: Any, dtype: str) -> Any:
    """Convert a model to plain Hugging Face in float32, with weights rounded to `dtype` as the engine stores them."""
    model.float()
    round_parameters(model, precision_of(model, getattr(torch, dtype)))
    model.set_attn_implementation("eager")
    use_eager_experts(model)
    return model

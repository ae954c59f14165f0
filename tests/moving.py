"""Engines between which sequences move, and the kinds of moves."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from on_device import DEVICE

from rlhfspec.engine import Completion, Engine, Request, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.engine.forward.runner import ModelRunner
from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.kv_pack import pack_slots
from rlhfspec.kernels.tree_attention import AttentionMeta
from rlhfspec.testing import movable
from rlhfspec.testing.engine import GainStreams, drain
from rlhfspec.tiny import perturbed, random_model

VOCAB = 260  # the byte tokenizer's
DRAFTS_FOR_ITSELF = DEVICE != "cpu" or build.load() is not None  # drafter "self" can be made here
TREE = DraftPlan(drafter="model", depth=4, width=2, branch=2)
SUFFIX = DraftPlan(drafter="suffix", depth=4, width=2, branch=2)
PROMPT = tuple(range(40))
Bits = tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...], str]


@functools.cache
def model(kind: str = "llama") -> Any:
    return random_model(kind, seed=1, vocab_size=VOCAB)


@functools.cache
def draft() -> Any:
    return perturbed(model(), 0.1)


def make(**options: Any) -> Engine:
    chosen = {"max_sequences": 8, "max_context": 128, "profile": False, "num_threads": 1, "speculation": TREE} | options
    extra = {"tokenizer": chosen.pop("tokenizer", None), "draft": chosen.pop("draft", draft())}
    given = chosen.pop("model", model())
    extra["draft"] = copy.deepcopy(extra["draft"])
    return make_engine(copy.deepcopy(given), EngineConfig(**chosen), **extra)


def request(
    name: str, prompt: tuple[int, ...] = PROMPT, *, seed: int = 7, stays: bool = False, **params: Any
) -> Request:
    params = {"max_tokens": 30, "ignore_eos": True} | params
    return Request(id=name, prompt_token_ids=prompt, params=SamplingParams(**params), seed=seed, stays=stays)


def bits(done: Completion) -> Bits:
    """Return what the law fixes. On a device only tokens: log-probs depend on neighbouring rows there."""
    numbers = (done.log_probs, done.tempered_log_probs) if DEVICE == "cpu" else ((), ())
    return done.token_ids, *numbers, done.finish_reason


@functools.cache
def alone(seed: int = 7, max_tokens: int = 30, prompt: tuple[int, ...] = PROMPT) -> Bits:
    engine = make(speculation="off")
    engine.submit(request("x", prompt, seed=seed, max_tokens=max_tokens))
    return bits(drain(engine)["x"])


def fresh_forward(runner: ModelRunner, tokens: np.ndarray, wanted: np.ndarray) -> torch.Tensor:
    """Return logits at wanted positions of one forward; position p's KV is in slot p afterwards."""
    positions = np.arange(len(tokens), dtype=np.int32)
    meta = AttentionMeta(
        slots=positions, table_rows=np.zeros(len(tokens), np.int32), context_lens=positions + np.int32(1),
        extra=np.empty((len(tokens), 0), np.int32), slot_table=positions[None].copy(),
    )  # fmt: skip
    return runner.forward(tokens.astype(np.int32), positions, meta, wanted.astype(np.int32))


def kv_at(runner: ModelRunner, slots: np.ndarray) -> torch.Tensor:
    return pack_slots(runner.kv, torch.from_numpy(slots.astype(np.int32)).to(runner.kv.device))


def check(*engines: Engine) -> None:
    for engine in engines:
        engine.check_integrity()


def unheard(way: movable.Way) -> Callable[[Engine, Engine, str, np.random.Generator], list[Completion]]:
    """Return the way without a check of what the engines' steps report."""

    @functools.wraps(way)
    def moved(here: Engine, there: Engine, name: str, rng: np.random.Generator) -> list[Completion]:
        return way(here, there, name, rng, GainStreams())

    return moved


at_once, reserved, in_rounds = map(unheard, (movable.at_once, movable.reserved, movable.in_rounds))

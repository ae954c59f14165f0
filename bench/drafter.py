"""What a drafter learns while a run goes on: python bench/drafter.py [--tokens 35000] [--passes 1] [--json FILE].

The synthetic pair `library` (byte-level models trained on the standard library's text, 3.3M and .3M parameters): tokens a
verification of a drafted chain of six at temperature 1, on prompts and seeds that nothing is learnt from. First as the
drafter begins, then after it has learnt from `--tokens` tokens that were verified, each `--passes` times. All print the
same digest: that of the tokens, which no drafter changes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rlhfspec.bench.tables import table
from rlhfspec.engine import Engine, SamplingParams
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.tiny import library
from rlhfspec.tiny.models import ensure

SEQUENCES, LENGTH, MEASURED = 16, 256, 128
CHAIN = {name: DraftPlan(drafter=name, depth=6) for name in ("suffix", "model")}


@dataclass(frozen=True, slots=True)
class DrafterRow:
    drafter: str
    begins: float  # tokens a verification
    learnt: float | None
    seconds: float  # of learning
    digest: str


def measure(engine: Engine) -> tuple[float, str]:
    """Tokens a verification, and the digest of the tokens."""
    done = sample(engine, prompts=991, seed=5000, num_tokens=MEASURED)
    tokens = [each.token_ids for each in done]
    rate = sum(map(len, tokens)) / sum(each.stats.num_verifications for each in done)
    return rate, hashlib.sha256(repr(tokens).encode()).hexdigest()[:8]


def sample(engine: Engine, *, prompts: int, seed: int, num_tokens: int) -> list:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    chosen = [tuple(prompt) for prompt in library.prompts(SEQUENCES, seed=prompts)]
    return engine.generate(chosen, params, seeds=range(seed, seed + SEQUENCES))


def row(name: str, drafter: str | None, *, num_tokens: int, passes: int) -> DrafterRow:
    engine = Engine.from_pretrained(
        ensure("library").library, drafter=drafter, num_threads=1, max_sequences=SEQUENCES, max_context=400,
        profile=False, learning="off" if not num_tokens else 1.0, speculation="off",
    )  # fmt: skip
    engine.set_speculation(CHAIN["suffix" if drafter is None else "model"])
    learning, engine.learning = engine.learning, None  # what is measured is not learnt from
    begins, digest = measure(engine)
    if not num_tokens:
        return DrafterRow(name, begins, None, 0.0, digest)
    assert learning is not None
    learning.limit_passes(passes)
    seconds, batches = 0.0, -(-num_tokens // (SEQUENCES * LENGTH))
    for number in range(batches):
        engine.learning, engine.learn = learning, lambda idle: False
        sample(engine, prompts=3000 + number, seed=100_000 * (number + 1), num_tokens=LENGTH)
        del engine.learn
        began = time.perf_counter()
        while engine.learn(idle=True):
            pass
        seconds += time.perf_counter() - began
    engine.learning = None
    learnt, after = measure(engine)
    assert after == digest, "a drafter changed a token"
    return DrafterRow(name, begins, learnt, seconds, digest)

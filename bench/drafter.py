"""Measure how many tokens per verification a drafter gains by learning during a run.

    python bench/drafter.py [--tokens 208896] [--drafters given]

The synthetic pair `library` drafts chains of six at temperature 1, before and after learning from `--tokens` verified
tokens, each used at most `--passes` times. Measured prompts and seeds are not learnt from. No drafter may change the
printed digest of tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rlhfspec.engine import Completion, Engine, SamplingParams
from rlhfspec.engine.distilling import learning as distilling
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.tiny import library
from rlhfspec.tiny.models import ensure

SEQUENCES, LEARNT_FROM, MEASURED = 16, 256, 128
CHAIN = {name: DraftPlan(drafter=name, depth=6) for name in ("suffix", "model")}


@dataclass(frozen=True, slots=True)
class DrafterRow:
    drafter: str
    begins: float  # tokens a verification
    learnt: float | None
    num_tokens: int  # learnt from, counted once per use
    seconds: float  # of learning
    digest: str


def measure(engine: Engine) -> tuple[float, str]:
    """Return the tokens per verification, and the digest of the tokens."""
    done = sample(engine, prompts=991, seed=5000, num_tokens=MEASURED)
    tokens = [each.token_ids for each in done]
    rate = sum(map(len, tokens)) / sum(each.stats.num_verifications for each in done)
    return rate, hashlib.sha256(repr(tokens).encode()).hexdigest()[:8]


def learn_from(engine: Engine, num_tokens: int) -> None:
    """Generate `num_tokens` tokens in rounds, learning after each until no tokens are left to learn from."""
    for number in range(-(-num_tokens // (SEQUENCES * LEARNT_FROM))):
        sample(engine, prompts=3000 + number, seed=100_000 * (number + 1), num_tokens=LEARNT_FROM)
        while engine.learning.learn_while_idle():
            pass


def sample(engine: Engine, *, prompts: int, seed: int, num_tokens: int) -> list[Completion]:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return engine.generate(library.prompts(SEQUENCES, seed=prompts), params, seeds=range(seed, seed + SEQUENCES))


def row(name: str, drafter: str | Path | None, *, num_tokens: int) -> DrafterRow:
    engine = Engine.from_pretrained(
        ensure("library").library, drafter=drafter, num_threads=1, max_sequences=SEQUENCES, max_context=400,
        profile=False, learning=1.0 if num_tokens else "off", speculation="off",
    )  # fmt: skip
    engine.set_speculation(CHAIN["suffix" if drafter is None else "model"])
    learning, engine.learning = engine.learning, None  # measured tokens are not learnt from
    begins, digest = measure(engine)
    if learning is None:
        return DrafterRow(name, begins, None, 0, 0.0, digest)
    engine.learning = learning
    learn_from(engine, num_tokens)
    engine.learning = None
    learnt, after = measure(engine)
    assert after == digest, "a drafter changed a token"
    report = learning.report
    return DrafterRow(name, begins, learnt, report.num_tokens, report.seconds, digest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=208_896)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--drafters", default="suffix,given", help="of these")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    distilling.PASSES = given.passes
    drafters = {"suffix": None, "given": ensure("library-draft").library_draft}
    rows = [
        row(name, drafters[name], num_tokens=given.tokens if drafters[name] else 0)
        for name in given.drafters.split(",")
    ]
    print(f"{'drafter':<14}{'begins':>8}{'learnt':>8}{'tokens':>9}{'seconds':>9}  digest")
    for each in rows:
        learnt = f"{each.learnt:.2f}" if each.learnt is not None else "-"
        print(
            f"{each.drafter:<14}{each.begins:>8.2f}{learnt:>8}{each.num_tokens:>9,}{each.seconds:>9.1f}  {each.digest}"
        )
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(each) for each in rows], indent=1))


if __name__ == "__main__":
    main()

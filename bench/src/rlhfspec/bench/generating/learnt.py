"""The drafter of the pair `learnt`: made of the policy by `drafter: auto`, and trained on what the policy generates.

It is made of the narrow form of the target, 3.3M parameters, which is the same function (docs/benchmarks.md): so its
two layers of four cost next to nothing beside the 77M that are timed, as two layers of a deep model do. Made of the
wide form they would cost half of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhfspec.tiny.recipe import cache_folder, make_in_cache

NUM_TOKENS = 208_000  # verified ones, each learnt from up to four times
_SEQUENCES, _LENGTH = 16, 256
Report = Callable[[str], None]


def ensure_learnt(report: Report, *, num_tokens: int = NUM_TOKENS) -> Path:
    """Return its folder, made when it is not there yet: some minutes on one core."""
    from rlhfspec.tiny import ensure
    from rlhfspec.tiny.recipe import LIBRARY

    folder = cache_folder() / f"learnt-{num_tokens}-{LIBRARY.folder_name}"
    if folder.exists():
        return folder
    from rlhfspec.engine import Engine

    policy = ensure("library", report=report).library
    engine = Engine.from_pretrained(
        policy, drafter="auto", learning=1.0, num_threads=1, max_sequences=_SEQUENCES, max_context=400, profile=False,
        speculation="model-d4",
    )  # fmt: skip
    learn_from(engine, num_tokens, report)
    assert engine.state.student is not None
    make_in_cache(folder.parent)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        engine.state.student.model.bfloat16().save_pretrained(made)
        made.rename(folder)
    return folder


def learn_from(engine: Any, num_tokens: int, report: Report = lambda line: None) -> None:
    """Generate so many tokens of the library's text, and learn after every few thousand until nothing is left."""
    for number in range(-(-num_tokens // (_SEQUENCES * _LENGTH))):
        sample(engine, prompts=3000 + number, seed=100_000 * (number + 1), num_tokens=_LENGTH)
        while engine.learning.learn_while_idle():
            pass
        told = engine.learning.report
        report(f"the drafter learns: {(number + 1) * _SEQUENCES * _LENGTH:,} tokens, {told.seconds:.0f} s of learning")


def sample(engine: Any, *, prompts: int, seed: int, num_tokens: int) -> list[Any]:
    from rlhfspec.engine import SamplingParams
    from rlhfspec.tiny import library

    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    chosen = [tuple(prompt) for prompt in library.prompts(_SEQUENCES, seed=prompts)]
    done: list[Any] = engine.generate(chosen, params, seeds=range(seed, seed + _SEQUENCES))
    return done

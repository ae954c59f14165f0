"""Prompts, lengths and seeds to generate, the same for every mode and baseline.

Example:
    >>> [(s.name, s.num_sequences) for s in scenarios(["batch-4", "long-tail"], num_tokens=16)]
    [('batch-4', 4), ('long-tail', 64)]
    >>> [run] = scenarios(["batch-1"], num_tokens=16)
    >>> run.seeds(repetition=0) != run.seeds(repetition=1)
    True
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from rlhfspec.errors import InvalidRequest
from rlhfspec.tiny import corpus, library, smollm2
from rlhfspec.tiny.tokenizer import decode

BATCHES = (1, 4, 8, 16, 32, 64)
SCENARIO_NAMES = (*(f"batch-{size}" for size in BATCHES), "long-tail")
MAX_CONTEXT = 640  # prompts are shorter than 128 tokens, responses at most 512

# Tiny models with a draft; and a pretrained one that drafts for itself, chats or sums.
PAIRS = ("english", "library", "smollm2", "smollm2-sums")
_TAIL_SEQUENCES, _TAIL_LIMIT = 64, 512
_TAIL_MEDIAN_OF_BATCH, _TAIL_SIGMA = 0.75, 0.9  # a few sequences run several times longer than the median


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchScenario:
    """Prompts and exact response lengths `max_tokens`; end-of-sequence tokens are ignored."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]

    @property
    def num_sequences(self) -> int:
        return len(self.prompts)

    @property
    def num_tokens(self) -> int:
        return sum(self.max_tokens)

    def seeds(self, repetition: int) -> list[int]:
        return [1_000_003 * (repetition + 1) + index for index in range(self.num_sequences)]


def scenarios(names: Iterable[str], *, num_tokens: int, pair: str = "english") -> list[BenchScenario]:
    """Return the scenarios; responses have `num_tokens`, or lognormal lengths around 3/4 of it in long-tail."""
    return [_scenario(name, num_tokens, pair) for name in names]


def batch_scenario(size: int, num_tokens: int, pair: str = "english") -> BenchScenario:
    return _of_lengths(f"batch-{size}", [num_tokens] * size, pair)


def _scenario(name: str, num_tokens: int, pair: str) -> BenchScenario:
    if name not in SCENARIO_NAMES:
        raise InvalidRequest("scenarios", name, f"must be among {', '.join(SCENARIO_NAMES)}")
    if name == "long-tail":
        return _of_lengths(name, _tail_lengths(num_tokens), pair)
    return batch_scenario(int(name.removeprefix("batch-")), num_tokens, pair)


def _of_lengths(name: str, lengths: list[int], pair: str) -> BenchScenario:
    return BenchScenario(name=name, prompts=_prompts(len(lengths), pair), max_tokens=tuple(lengths))


def _prompts(count: int, pair: str) -> tuple[tuple[int, ...], ...]:
    if pair.startswith("smollm2"):
        questions = _sums(count) if pair == "smollm2-sums" else explanations(count)
        return _chats(questions)
    text = corpus if pair == "english" else library
    return tuple(tuple(prompt) for prompt in text.prompts(count, seed=7))


def _sums(count: int) -> list[str]:
    draw = random.Random(7)
    return [f"What is {draw.randint(10, 99)} + {draw.randint(10, 99)}? Explain every step." for _ in range(count)]


def explanations(count: int) -> list[str]:
    """Return questions about beginnings of texts of Python's standard library."""
    texts = (decode(prompt) for prompt in library.prompts(count, seed=7))
    return [f"Explain this beginning of a text, and go on with it:\n{text}" for text in texts]


def _chats(questions: list[str]) -> tuple[tuple[int, ...], ...]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.folder())
    chats = [[{"role": "user", "content": question}] for question in questions]
    found = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    return tuple(map(tuple, found))


def _tail_lengths(num_tokens: int) -> list[int]:
    rng = random.Random(11)
    mean = math.log(_TAIL_MEDIAN_OF_BATCH * num_tokens)
    draws = [rng.lognormvariate(mean, _TAIL_SIGMA) for _ in range(_TAIL_SEQUENCES)]
    return [min(max(round(length), 8), _TAIL_LIMIT) for length in draws]

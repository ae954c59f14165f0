"""Torch-free task of the demo: addition with worked steps.

    prompt     48+75=
    worked     8+5=13 keep 3 carry 1 left 4+7, 4+7+1=12 keep 23 carry 1, answer 123
    guessed    answer 113

Lessons of the initial model contain guesses and slips, so that it solves sums unreliably.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

NUM_DIGITS = (1, 2, 3, 4)
TASK_WEIGHTS = (20, 42, 28, 10)  # of the data, by number of digits
LESSON_WEIGHTS = (14, 34, 32, 20)  # of the lessons: long sums are harder to learn
GUESSED_SHARE = 0.28  # of the batches of lessons; they are short, so each of their tokens counts for more
SLIP_RATE = 0.04  # of the steps of a lesson
_LESSON_SIZE = 100  # digits and answers of a batch
GUESS = "answer "  # how a guess begins
_ANSWER = re.compile(r"answer (\d+)$")
_WORKED_STEP = re.compile(r"\b(\d)\+(\d)(?:\+(1))?=(\d{1,2}) keep (\d)\d* carry ([01])\b")


def worked(left: str, right: str, slips: random.Random | None = None) -> str:
    """Return a sum's worked steps and answer. With `slips` (random numbers), some steps are off by one."""
    carry, digits, parts = 0, "", []
    for place in reversed(range(len(left))):
        one, other = left[place], right[place]
        total = int(one) + int(other) + carry
        if slips is not None and slips.random() < SLIP_RATE:
            total = max(0, total + slips.choice((-1, 1)))
        addends = f"{one}+{other}+1" if carry else f"{one}+{other}"
        carry, digit = divmod(total, 10)
        digits = f"{digit}{digits}"
        rest = f" left {left[:place]}+{right[:place]}" if place else ""
        parts.append(f"{addends}={total} keep {digits} carry {carry}{rest}")
    return ", ".join([*parts, f"answer {'1' if carry else ''}{digits}"])


def answer(left: str, right: str) -> str:
    """Return the text after "answer ": the digits, with a leading 1 on a carry.

    >>> answer("48", "75"), answer("02", "03")
    ('123', '05')
    """
    return str(int(left) + int(right)).zfill(len(left))


def rows(count: int, seed: int, *, without: Sequence[Mapping[str, str]] = ()) -> list[dict[str, str]]:
    """Return `count` rows with `prompt` and `answer`, except prompts of `without`."""
    rng, known = random.Random(seed), {row["prompt"] for row in without}
    pairs = iter(lambda: _pair(rng, rng.choices(NUM_DIGITS, TASK_WEIGHTS)[0]), None)
    found = ({"prompt": f"{left}+{right}=", "answer": answer(left, right)} for left, right in pairs)
    return list(islice((row for row in found if row["prompt"] not in known), count))


def jsonl(count: int, seed: int, *, without: Sequence[Mapping[str, str]] = ()) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows(count, seed, without=without))


def lessons(*, seed: int) -> Iterator[list[tuple[str, str]]]:
    """Yield batches of (prompt, response): guessed answers or worked steps, with equally long numbers in a batch."""
    rng = random.Random(seed)
    while True:
        num_digits = rng.choices(NUM_DIGITS, LESSON_WEIGHTS)[0]
        guessed = rng.random() < GUESSED_SHARE
        yield [_lesson(rng, num_digits, guessed=guessed) for _ in range(_LESSON_SIZE // (num_digits + 1))]


def lesson_texts(count: int, *, seed: int) -> list[str]:
    batches = islice(lessons(seed=seed), count)
    return [prompt + response for batch in batches for prompt, response in batch]


def _pair(rng: random.Random, num_digits: int) -> tuple[str, str]:
    left, right = (str(rng.randrange(10**num_digits)).zfill(num_digits) for _ in range(2))
    return left, right


def _lesson(rng: random.Random, num_digits: int, *, guessed: bool) -> tuple[str, str]:
    left, right = _pair(rng, num_digits)
    return f"{left}+{right}=", GUESS if guessed else worked(left, right, rng)


# -- rewards: functions of the completion and of the data's column `answer` alone ----------------------------------


def correct(completion: str, answer: str) -> float:
    found = _ANSWER.search(completion)
    return float(found is not None and found[1] == answer)


def steps(completion: str) -> float:
    """Return the share of shown steps that are right, or 0 without any.

    >>> steps("8+5=13 keep 3 carry 1 left 4+7, 4+7+1=13 keep 33 carry 1, answer 133"), steps("answer 123")
    (0.5, 0.0)
    """
    shown = [_is_right(*found) for found in _WORKED_STEP.findall(completion)]
    return sum(shown) / len(shown) if shown else 0.0


def carries(completion: str) -> float:
    """Return an exploitable reward: a quarter for each carry, right or wrong, up to 1.

    >>> carries("8+5=13 keep 3 carry 1, answer 13"), carries("1+1=18 keep 8 carry 1, " * 4)
    (0.25, 1.0)
    """
    return min(completion.count("carry 1") / 4, 1.0)


def _is_right(one: str, other: str, carried: str, total: str, kept: str, carry: str) -> bool:
    return int(one) + int(other) + int(carried or 0) == int(total) == int(carry + kept)

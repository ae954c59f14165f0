"""Endless templated English, quick to learn but with real entropy."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from rlhfspec.tiny.tokenizer import BOS, EOS, encode


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_FIRST_NAMES = _words(
    "Ada Ben Carla David Elena Farid Greta Hugo Ines Jonas Kira Leo Mona Nils Olga Paul Quinn Rosa Sami Tara "
    "Uma Viktor Wanda Xaver Yara Zeno Amir Bruno Clara Dora Emil Fiona"
)
PLACES = _words(
    "harbour windmill library market station castle garden school river forest bakery workshop museum bridge "
    "lighthouse village"
)
THINGS = _words(
    "apples pears books coins stamps shells pencils tickets candles bottles marbles letters lamps baskets keys cups"
)
ADJECTIVES = _words("small large green silver broken heavy quiet wooden bright narrow golden empty")
NOUNS = _words("lantern boat ladder violin compass kettle mirror wagon blanket clock statue hammer")
WEATHER = _words("cold warm rainy windy foggy sunny stormy calm")
ACTIONS = _words("found sold painted repaired lost bought carried polished hid borrowed")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")


def _sum(rng: random.Random) -> str:
    left, right = rng.randrange(2, 60), rng.randrange(2, 40)
    return f"{left} + {right} = {left + right}."


def _difference(rng: random.Random) -> str:
    left, right = rng.randrange(30, 99), rng.randrange(2, 30)
    return f"{left} - {right} = {left - right}."


def _word_problem(rng: random.Random) -> str:
    name, thing = rng.choice(_FIRST_NAMES), rng.choice(THINGS)
    first, second = rng.randrange(2, 20), rng.randrange(2, 20)
    if rng.random() < 0.5:
        return f"{name} has {first} {thing} and gets {second} more. Now {name} has {first + second} {thing}."
    total = first + second
    return f"{name} has {total} {thing} and gives away {second}. Now {name} has {first} {thing}."


def _prose(rng: random.Random) -> str:
    name, other = rng.sample(_FIRST_NAMES, 2)
    weather, day, place = rng.choice(WEATHER), rng.choice(DAYS), rng.choice(PLACES)
    thing = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    return f"On a {weather} {day} {name} went to the {place} and {rng.choice(ACTIONS)} a {thing} for {other}."


def _question(rng: random.Random) -> str:
    name, place = rng.choice(_FIRST_NAMES), rng.choice(PLACES)
    return f"Question: Where does {name} work? Answer: {name} works at the {place}."


def _copying(rng: random.Random) -> str:
    words = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} near the {rng.choice(PLACES)}"
    return f"{rng.choice(_FIRST_NAMES)} said: {words}. Everybody repeated: {words}."


def _record(rng: random.Random) -> str:
    name, day, item = rng.choice(_FIRST_NAMES), rng.choice(DAYS), rng.choice(THINGS)
    number, price = rng.randrange(2, 30), rng.randrange(2, 10)
    return f"name={name}; day={day}; item={item}; number={number}; price={price}; total={number * price}."


def _counting(rng: random.Random) -> str:
    start, step = rng.randrange(1, 10), rng.randrange(1, 6)
    numbers = ", ".join(str(start + step * i) for i in range(rng.randrange(5, 9)))
    return f"Count from {start} in steps of {step}: {numbers}."


SENTENCES: tuple[Callable[[random.Random], str], ...] = (
    _sum,
    _difference,
    _word_problem,
    _prose,
    _question,
    _copying,
    _record,
    _counting,
)


def _endless(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        yield " ".join(rng.choice(SENTENCES)(rng) for _ in range(rng.randrange(1, 9)))


def documents(count: int, *, seed: int) -> list[str]:
    source = _endless(seed)
    return [next(source) for _ in range(count)]


def token_stream(num_tokens: int, *, seed: int) -> list[int]:
    """Return documents as token ids, each between BOS and EOS."""
    return tokens_of(_endless(seed), num_tokens)


def tokens_of(documents: Iterator[str], num_tokens: int) -> list[int]:
    stream: list[int] = []
    while len(stream) < num_tokens:
        stream += [BOS, *encode(next(documents)), EOS]
    return stream[:num_tokens]


def text(num_bytes: int, *, seed: int) -> str:
    """Return `num_bytes` of documents, one token per byte."""
    found = ""
    for document in _endless(seed):
        found += document + " "
        if len(found) >= num_bytes:
            break
    return found[:num_bytes]


def prompts(count: int, *, seed: int, shortest: int = 24, longest: int = 96) -> list[list[int]]:
    return beginnings(_endless(seed), count, seed, shortest, longest)


def beginnings(documents: Iterator[str], count: int, seed: int, shortest: int, longest: int) -> list[list[int]]:
    """Return beginnings of `count` documents, cut between `shortest` and `longest` characters, with BOS."""
    rng = random.Random(seed)
    chosen: list[list[int]] = []
    for document in documents:
        if len(chosen) == count:
            break
        ids = encode(document[: document.find(" ", rng.randrange(shortest, longest)) + 1])
        if 0 < len(ids) < longest + 24:
            chosen.append([BOS, *ids])
    return chosen

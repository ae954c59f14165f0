"""Tasks of reasoning-gym as data, `reasoning-gym:TASK`, and their scorer as the reward function `reasoning-gym`.

    reasoning-gym:chain_sum                                      500 rows
    reasoning-gym:chain_sum?size=2000&seed=7&max_terms=3         other settings are the task's own
    reasoning-gym:chain_sum?size=200+letter_counting?size=200    several tasks; the column task names a row's

Columns: `messages` (worked examples and the question), `prompt` (the question), `answer`, `task`, and `entry` for the
scorer. Answers are expected in `<answer>` tags.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import secrets
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from rlhfspec.errors import InvalidRequest, did_you_mean
from rlhfspec.tiny.recipe import cache_folder, make_in_cache

PREFIX = "reasoning-gym:"
_SYSTEM = "Answer the question. Write the answer between <answer> and </answer> tags, and nothing else."
_SIZE, _SEED, _EXAMPLES = 500, 0, 2  # defaults: rows, seed, worked examples before the question
_OF_EXAMPLES = 1 << 20  # added to the seed, so that no example is a row


def check(path: str) -> None:
    """Raise InvalidRequest unless reasoning-gym is installed and has the tasks and settings that `path` names."""
    list(_datasets(path))


def ensure(path: str) -> Path:
    """Write the rows of the tasks to a JSONL file in the cache and return its path."""
    rows = [row for task, shown, dataset in _datasets(path) for row in _rows(task, shown, dataset)]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    file = cache_folder().parent / "data" / f"reasoning-gym-{digest}.jsonl"
    if not file.exists():
        make_in_cache(file.parent)
        scratch = file.with_suffix(f".{secrets.token_hex(8)}")
        scratch.write_text(text)
        scratch.replace(file)
    return file


def score(completion: str, entry: str) -> float:
    """Return the task's score of the text in the last `<answer>` tags, 0 without any."""
    from reasoning_gym.utils import extract_answer

    row = json.loads(entry)
    found = extract_answer(completion)
    return 0.0 if found is None else float(_scorer(row["metadata"]["source_dataset"])(found, row))


@cache
def _scorer(task: str) -> Any:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)


def _datasets(path: str) -> Iterator[tuple[str, list[Any], Any]]:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise InvalidRequest("path", path, "needs the package reasoning-gym: pip install 'rlhfspec[reasoning-gym]'")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    for part in path.removeprefix(PREFIX).split("+"):
        task, _, query = part.partition("?")
        if task not in DATASETS:
            hint = did_you_mean(task, DATASETS) or "; reasoning_gym.factory.DATASETS lists all"
            raise InvalidRequest("path", path, f"reasoning-gym has no task {task!r}{hint}")
        settings = {name: _number(value) for name, value in parse_qsl(query, keep_blank_values=True)}
        size, seed = settings.pop("size", _SIZE), settings.pop("seed", _SEED)
        examples = settings.pop("examples", _EXAMPLES)
        try:
            dataset = reasoning_gym.create_dataset(task, size=size, seed=seed, **settings)
            shown = reasoning_gym.create_dataset(task, size=max(1, examples), seed=seed + _OF_EXAMPLES, **settings)
            yield task, [shown[number] for number in range(examples)], dataset
        except (TypeError, ValueError, AssertionError) as error:
            raise InvalidRequest("path", path, f"{task} refuses these settings: {error}") from None


def _number(value: str) -> Any:
    """Parse a setting as a number, a bool or text.

    >>> _number("7"), _number(".5"), _number("true"), _number("add,sub")
    (7, 0.5, True, 'add,sub')
    """
    for read in (int, float):
        try:
            return read(value)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(value.lower(), value)


def _rows(task: str, shown: list[Any], dataset: Any) -> Iterator[dict[str, Any]]:
    before = [{"role": "system", "content": _SYSTEM}]
    for example in shown:
        before += [
            {"role": "user", "content": example["question"]},
            {"role": "assistant", "content": f"<answer>{example['answer']}</answer>"},
        ]
    for entry in dataset:
        question = {"role": "user", "content": entry["question"]}
        yield {
            "messages": [*before, question],
            "prompt": entry["question"],
            "answer": entry["answer"],
            "task": task,
            "entry": json.dumps(entry, default=str, sort_keys=True),
        }

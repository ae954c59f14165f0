"""Prompts from dataset rows: text, token ids, and columns for rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhfspec.engine.scheduling.text import Tokenizer
from rlhfspec.errors import InvalidRequest, JobError, Problem, did_you_mean, first_line
from rlhfspec.huggingface.structure.positions import config_of
from rlhfspec.job import Dataset, Model
from rlhfspec.training.data.columns import columns_of, columns_of_rows, json_text
from rlhfspec.training.data.order import Order
from rlhfspec.training.data.rows import Rows
from rlhfspec.training.data.text_files import at_most

_LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError)
_BATCH = 1000  # texts per call, which fast tokenizers process in parallel


@dataclass(frozen=True, slots=True)
class PromptRow:
    text: str
    token_ids: tuple[int, ...]
    columns_json: str


class Prompts:
    """Prompts of a dataset. Construction fails on malformed rows."""

    def __init__(self, rows: Rows, tokenizer: Tokenizer, dataset: Dataset, seed: int, prompts_per_step: int) -> None:
        check_rows(rows, dataset)
        self._rows = rows
        self._tokenizer = tokenizer
        self._dataset = dataset
        self._kept, self.longest = self._short_enough()
        self.num_too_long = len(rows) - len(self._kept)
        self.order = Order(
            num_rows=len(self._kept),
            prompts_per_step=prompts_per_step,
            seed=seed,
            shuffle=dataset.shuffle,
            epochs=dataset.epochs,
        )

    @property
    def columns(self) -> dict[str, str]:
        """Map each column for rewards to the line of the first prompt that lacks it, or to an empty string."""
        return columns_of_rows(self._rows, self._dataset, self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> PromptRow:
        return self._prompt(self._kept[index])

    def indices(self, step: int, round: int = 0, count: int | None = None) -> list[int]:
        return self.order.indices(step, round, count)

    def take(self, step: int, round: int = 0, count: int | None = None) -> list[tuple[int, PromptRow]]:
        """Return a round's prompts, each with its number within the step."""
        chosen = self.indices(step, round, count)
        return [(place, self[index]) for place, index in zip(self.order.places(round, count), chosen, strict=True)]

    def _short_enough(self) -> tuple[list[int], int]:
        longest = self._dataset.max_prompt_tokens
        lengths: list[int] = []
        for start in range(0, len(self._rows), _BATCH):
            texts = [self._text(index) for index in range(start, min(start + _BATCH, len(self._rows)))]
            lengths += map(len, self._encode(texts))
        kept = [index for index, length in enumerate(lengths) if 0 < length <= longest]
        if not kept:
            raise JobError(self._rows.source, [self._no_prompt_left(lengths)])
        return kept, max(lengths[index] for index in kept)

    def _no_prompt_left(self, lengths: list[int]) -> Problem:
        if any(lengths):
            problem = f"every prompt is longer; the shortest of {len(lengths)} has {min(lengths)} tokens"
            return Problem(field="spec.dataset.maxPromptTokens", value=self._dataset.max_prompt_tokens, problem=problem)
        of_chat = self._dataset.messages_column is not None
        field, maker = ("messagesColumn", "chat template") if of_chat else ("promptColumn", "tokenizer")
        problem = f"the {maker} produces no token for any of the {len(lengths)} prompts"
        return Problem(field=f"spec.dataset.{field}", problem=problem)

    @property
    def _column(self) -> str:
        column = self._dataset.messages_column or self._dataset.prompt_column
        assert column is not None, "the job was checked"
        return column

    def _prompt(self, index: int) -> PromptRow:
        text = self._text(index)
        columns = json_text(columns_of(self._rows.records[index], self._dataset))
        return PromptRow(text, tuple(self._encode([text])[0]), columns)

    def _text(self, index: int) -> str:
        value = self._rows.records[index][self._column]
        return (
            str(value) if self._dataset.messages_column is None else render(self._tokenizer, value, self._rows, index)
        )

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Tokenize, adding special tokens only to plain text, because chat templates contain them."""
        return self._tokenizer(texts, add_special_tokens=self._dataset.messages_column is None)["input_ids"]


def render(tokenizer: Any, messages: list[Mapping[str, Any]], rows: Rows, index: int) -> str:
    """Render chat messages with the model's template, including the generation prompt."""
    from jinja2.exceptions import TemplateError

    field = "spec.dataset.messagesColumn"
    if not getattr(tokenizer, "chat_template", None):
        problem = "the tokenizer has no chat template; use promptColumn, or a tokenizer that has one (model.tokenizer)"
        raise JobError(rows.source, [Problem(field=field, problem=problem)])
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except (TemplateError, TypeError, ValueError) as error:
        problem = f"the tokenizer's chat template refuses these messages: {error}"
        raise JobError(rows.source, [Problem(field=field, problem=problem, where=rows.where(index))]) from error


def load_tokenizer(model: Model) -> Any:
    from transformers import AutoTokenizer

    field, path = ("tokenizer", model.tokenizer) if model.tokenizer else ("path", model.path)
    field = f"spec.model.{field}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except _LOAD_ERRORS as error:
        raise InvalidRequest(field, path, f"no tokenizer can be loaded from it: {first_line(error)}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # some classes load like this without their files
        raise InvalidRequest(field, path, "its tokenizer has no vocabulary: the folder lacks tokenizer.json")
    _check_ids(tokenizer, model.path, field, path)
    return tokenizer


def _check_ids(tokenizer: Any, model: str, field: str, path: str) -> None:
    """Raise InvalidRequest if a token that prompts may contain has no embedding row."""
    config = config_of(model)
    num_rows = None if config is None else getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if num_rows is None:
        return  # loading the model reports why
    template = str(tokenizer.chat_template or "")
    # models may lack rows for special tokens outside the template, such as those for images
    in_template = [number for token, number in tokenizer.get_added_vocab().items() if token in template]
    largest = max([tokenizer.vocab_size - 1, *tokenizer(["a"])["input_ids"][0], *in_template])
    if largest >= num_rows:
        problem = f"its tokens have ids up to {largest}, but the model's embedding has {num_rows} rows"
        raise InvalidRequest(field, path, problem)


def check_rows(rows: Rows, dataset: Dataset) -> None:
    """Raise JobError with the line, column and value of each unusable row."""
    problems = []
    for index, row in enumerate(rows.records):
        problems += [
            Problem(field=field, value=value, problem=problem, where=rows.where(index))
            for field, value, problem in _row_problems(row, dataset)
        ]
    column = dataset.messages_column or dataset.prompt_column
    if not any(column in row for row in rows.records):  # the name is wrong, not every row
        problems = problems[:1]
    if problems:
        raise JobError(rows.source, at_most(problems))


def _row_problems(row: Mapping[str, Any], dataset: Dataset) -> Iterator[tuple[str, object, str]]:
    chat = dataset.messages_column is not None
    name, column = ("messagesColumn", dataset.messages_column) if chat else ("promptColumn", dataset.prompt_column)
    field = f"spec.dataset.{name}"
    assert column is not None, "the job was checked"
    if column not in row:
        there = ", ".join(row) or "none"
        yield field, column, f"no column {column}; this row has {there}{did_you_mean(column, row)}"
        return
    problem = _messages_problem(row[column]) if chat else _prompt_problem(row[column])
    if problem:
        yield field, None, f"column {column} {problem}"


def _prompt_problem(value: Any) -> str | None:
    if not isinstance(value, str):
        return f"must be text, not {_kind(value)}"
    return _text_problem(value) if value else "is empty; remove the row"


def _text_problem(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = ascii(text[error.start])[1:-1]
        return f"holds half of a character ({found}, at position {error.start + 1}); write the whole one, or remove it"
    return None


def _messages_problem(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return f'must be a list such as [{{"role": "user", "content": "..."}}], not {_kind(value)}'
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            return f"message {number} must be an object with role and content, not {_kind(message)}"
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                return f"message {number}: {key} must be text, not {_kind(message.get(key))}"
            if problem := _text_problem(message[key]):
                return f"message {number}: {key} {problem}"
    if value[-1]["role"] == "assistant":
        return "ends with an answer (role assistant); the last message must be one to answer"
    return None


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {str: "text", bool: "a truth value", int: "a number", float: "a number", list: "a list", dict: "an object"}
    if isinstance(value, list) and not value:
        return "an empty list"
    return names.get(type(value), type(value).__name__)

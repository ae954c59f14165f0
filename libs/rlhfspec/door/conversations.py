"""Conversion between conversations and token ids, in which sampled tokens are never encoded again."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import accumulate
from typing import Any

import numpy as np

from rlhfspec.common.arrays import IntArray
from rlhfspec.errors import InvalidRequest, first_line

_MOST_TOKENS = 1 << 24  # of remembered conversations, 64 MB; the oldest are forgotten first
_MOST_ALIKE = 8  # remembered answers of the same text to the same messages
_SOME_TOOL = "name_of_the_function"

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Turn:
    token_ids: IntArray  # prompt and answer
    is_ended: bool  # by a stop token, its last one


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    token_ids: tuple[int, ...]
    given: tuple[int, ...]  # the last ones, with which the answer begins
    key: bytes  # of its messages and template arguments


class Conversations:
    """Memory of one door's answers, found by the identity of the messages up to each answer.

    A known conversation goes on with all its token ids as they were, plus those of the text that the template adds.
    `counts` has the prompts of each kind: first, continued, and rewritten (the template changed earlier text).
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = [str(tokenizer.decode([token_id])) for token_id in eos_token_ids]
        self._own_arguments = set(signature(tokenizer.apply_chat_template).parameters) - {"tools"}
        self._turns: OrderedDict[bytes, list[_Turn]] = OrderedDict()  # the newest of a list first
        self._num_tokens = 0
        self.counts: Counter[str] = Counter()

    def prompt(
        self,
        messages: Sequence[Message],
        arguments: Mapping[str, Any],
        *,
        begin: str = "",
        required: Sequence[int] = (),
    ) -> ChatPrompt:
        """Return the ids that the next answer follows. `arguments`: further ones of the chat template.

        `begin`: text with which the answer begins, as `begin_of_call` returns it. `required`: the first ids, which
        tell answers of the same text apart.
        """
        rendered = self._render(messages, arguments)
        keys = list(accumulate(messages, _longer, initial=_longer(b"", arguments)))
        given = tuple(self._encode(begin))
        known = (count for count in range(len(messages) - 1, 0, -1) if keys[count] in self._turns)
        count = next(known, 0)  # of the longest known history
        turn = self._turn(keys[count], required) if count else None
        added = None if turn is None else self._added(turn, messages[:count], arguments, rendered)
        if turn is None or added is None:
            self.counts["first" if turn is None else "rewritten"] += 1
            return ChatPrompt((*self._encode(rendered), *given), given, keys[-1])
        self.counts["continued"] += 1
        return ChatPrompt((*turn.token_ids.tolist(), *self._encode(added), *given), given, keys[-1])

    def _turn(self, key: bytes, required: Sequence[int]) -> _Turn | None:
        turns = self._turns.get(key, [])
        fitting = (each for each in turns if each.token_ids[: len(required)].tolist() == list(required))
        return next(fitting, next(iter(turns), None))

    def answered(self, prompt: ChatPrompt, answer: Message, token_ids: Sequence[int], *, is_ended: bool) -> None:
        """Remember the ids of an answer. `is_ended`: whether the last one is a stop token."""
        key = _longer(prompt.key, answer)
        turn = _Turn(np.array([*prompt.token_ids, *token_ids], np.int32), is_ended)
        alike = self._turns.pop(key, [])
        self._turns[key] = [turn, *alike][:_MOST_ALIKE]
        self._num_tokens += len(turn.token_ids) - sum(len(each.token_ids) for each in alike[_MOST_ALIKE - 1 :])
        while self._num_tokens > _MOST_TOKENS:
            _, oldest = self._turns.popitem(last=False)
            self._num_tokens -= sum(len(each.token_ids) for each in oldest)

    def begin_of_call(self, messages: Sequence[Message], arguments: Mapping[str, Any], name: str | None) -> str:
        """Return the text with which the template begins a call of the tool, or of any tool."""
        call = {"id": "call_0", "type": "function", "function": {"name": _SOME_TOOL, "arguments": {}}}
        said = [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}]
        opened, called = self._render(messages, arguments), self._render(said, arguments, asks=False)
        before, found, _ = called.removeprefix(opened).partition(_SOME_TOOL)
        if not (called.startswith(opened) and found and before):
            raise InvalidRequest(
                "tool_choice", name or "required", "is not served: the chat template has no tool calls"
            )
        return before + (name or "")

    def _added(self, turn: _Turn, known: Sequence[Message], arguments: Mapping[str, Any], rendered: str) -> str | None:
        """Return the text after a known answer's last token, or None if the template rewrites what came before it."""
        opened, done = self._render(known[:-1], arguments), self._render(known, arguments, asks=False)
        end = max(self._ends, key=done.rfind, default="")
        at = done.rfind(end)
        if not (end and done.startswith(opened) and at >= len(opened) and rendered.startswith(done)):
            return None
        return rendered[at + len(end) if turn.is_ended else at :]

    def _render(self, messages: Sequence[Message], arguments: Mapping[str, Any], *, asks: bool = True) -> str:
        from jinja2.exceptions import TemplateError

        if not getattr(self._tokenizer, "chat_template", None):
            raise InvalidRequest("messages", "messages", "the tokenizer has no chat template; use /v1/completions")
        for name in arguments:
            if name in self._own_arguments:
                raise InvalidRequest("chat_template_kwargs", name, "is no variable of the chat template")
        try:
            conversation = [dict(each) for each in messages]
            return str(
                self._tokenizer.apply_chat_template(
                    conversation, tokenize=False, add_generation_prompt=asks, **arguments
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidRequest(
                "messages", "messages", f"the chat template refuses them: {first_line(error)}"
            ) from error

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _longer(key: bytes, message: Mapping[str, Any]) -> bytes:
    """Return the key of a conversation that goes on with a message."""
    return hashlib.blake2b(key + json.dumps(dict(message), sort_keys=True).encode(), digest_size=16).digest()

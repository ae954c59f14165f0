"""Answers in the shapes of OpenAI's API, whole and as chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhfspec.door.bodies import AskingBody, ChatBody
from rlhfspec.door.words import TokenTexts
from rlhfspec.engine.base import TopLogProbs


@dataclass(slots=True)
class Response:
    """Tokens of one choice: all of them, or those of one chunk."""

    index: int
    prompt_token_ids: tuple[int, ...]
    seed: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    tempered_log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    weights_versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)  # of tools

    @property
    def message(self) -> dict[str, Any]:
        calls = {"tool_calls": self.calls} if self.calls else {}
        return {"role": "assistant", "content": self.text or (None if self.calls else ""), **calls}

    def add(self, more: Response) -> None:
        self.token_ids += more.token_ids
        self.log_probs += more.log_probs
        self.tempered_log_probs += more.tempered_log_probs
        self.top_log_probs += more.top_log_probs
        self.weights_versions += more.weights_versions
        self.finish_reason = more.finish_reason
        self.text += more.text
        self.calls += more.calls


class Shape:
    """Shape of the answers to one request."""

    def __init__(self, body: AskingBody, name: str, model: str, texts: TokenTexts) -> None:
        self._body = body
        self._texts = texts
        self._is_chat = isinstance(body, ChatBody)
        self._head = {"id": name, "created": int(time.time()), "model": model}

    def whole(self, responses: Sequence[Response]) -> dict[str, Any]:
        choices = [self._choice(each, message=each.message) for each in responses]
        what = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": what, "choices": choices, "usage": usage(responses)}

    def first(self, response: Response) -> dict[str, Any]:
        """Return the chunk that opens a choice."""
        return self._chunk([self._choice(response, delta={"role": "assistant", "content": ""})])

    def chunk(self, response: Response) -> dict[str, Any]:
        """Return the chunk of a choice's next tokens."""
        calls = [{"index": index, **call} for index, call in enumerate(response.calls)]
        delta = {"content": response.text} | ({"tool_calls": calls} if calls else {})
        return self._chunk([self._choice(response, delta=delta)])

    def last(self, responses: Sequence[Response]) -> dict[str, Any]:
        """Return the chunk that tells the numbers of tokens."""
        return self._chunk([]) | {"usage": usage(responses)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        what = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._head, "object": what, "choices": choices}

    def _choice(self, response: Response, **said: dict[str, Any]) -> dict[str, Any]:
        asked = self._body.num_top is not None
        told: dict[str, Any] = {
            "index": response.index,
            "finish_reason": response.finish_reason,
            "logprobs": self._log_probs(response) if asked else None,
            "token_ids": response.token_ids,
            "weights_versions": response.weights_versions,
            "seed": response.seed,
        }
        if self._body.return_token_ids:
            told["prompt_token_ids"] = response.prompt_token_ids
        return told | (said if self._is_chat else {"text": response.text})

    def _log_probs(self, response: Response) -> dict[str, Any]:
        said = list(zip(response.token_ids, response.tempered_log_probs, strict=True))
        top = response.top_log_probs or [() for _ in said]
        told: dict[str, Any]
        if self._is_chat:
            content = [
                self._token(*each) | {"top_logprobs": [self._token(*other) for other in others]}
                for each, others in zip(said, top, strict=True)
            ]
            told = {"content": content, "refusal": None}
        else:
            told = {
                "tokens": [self._name(token_id) for token_id, _ in said],
                "token_logprobs": [value for _, value in said],
                "top_logprobs": [{self._name(token_id): value for token_id, value in others} for others in top],
                "text_offset": [],
            }
        return told | {"untempered": response.log_probs}

    def _token(self, token_id: int, value: float) -> dict[str, Any]:
        return {"token": self._name(token_id), "logprob": value, "bytes": self._texts.bytes(token_id)}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._body.return_tokens_as_token_ids else self._texts.text(token_id)


def usage(responses: Sequence[Response]) -> dict[str, int]:
    """Return the numbers of tokens; prompts that several choices share count once."""
    prompts = {each.prompt_token_ids for each in responses}
    num_prompt = sum(map(len, prompts))
    num_sampled = sum(len(each.token_ids) for each in responses)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}


def generated(name: str, response: Response) -> dict[str, Any]:
    """Return the answer of `/inference/v1/generate`: token ids in, token ids out."""
    content = [
        {"token": f"token_id:{token_id}", "logprob": value}
        for token_id, value in zip(response.token_ids, response.tempered_log_probs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": response.token_ids,
        "finish_reason": response.finish_reason,
        "logprobs": {"content": content, "untempered": response.log_probs},
        "weights_versions": response.weights_versions,
        "seed": response.seed,
    }
    return {"request_id": name, "choices": [choice], "usage": usage([response])}


def problem(message: str, *, kind: str = "invalid_request_error", param: str = "", code: str = "") -> dict[str, Any]:
    """Return the body of a refusal, as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param or None, "code": code or None}}

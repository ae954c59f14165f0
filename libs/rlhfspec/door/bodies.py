"""Bodies of requests, as the OpenAI API and vLLM's server define them, checked before an engine sees them.

>>> read(CompletionBody, b'{"model": "policy", "prompt": "2+2=", "top_p": 0}')
Traceback (most recent call last):
...
rlhfspec.errors.InvalidRequest: top_p: must be in (0, 1] (got 0.0)
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlhfspec.engine.base import MOST_TOP_LOG_PROBS
from rlhfspec.engine.params import SamplingParams
from rlhfspec.errors import InvalidRequest

_MOST_CHOICES = 128  # of one request, as in OpenAI's API
_MOST_STOPS = 16
# Fields that change an answer and are not served, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (0,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "routed_experts_prompt_start": (0,),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# Fields that change no answer here.
_WITHOUT_EFFECT = {
    "cache_salt", "conversation_params", "metadata", "priority", "prompt_cache_key",
    "prompt_cache_retention", "request_id", "safety_identifier", "service_tier", "spaces_between_special_tokens",
    "store", "user",
}  # fmt: skip
_TAGS = ("str", "int", "ChosenTool")  # of unions, in the places that pydantic names
TokenId = Annotated[int, Field(ge=0)]
NumTop = Annotated[int, Field(ge=0, le=MOST_TOP_LOG_PROBS)]


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class TextPart(Body):
    type: Literal["text"]
    text: str


class Named(Body):
    name: str


class Called(Named):
    arguments: str


class ToolCall(Body):
    id: str = ""
    function: Called

    def for_template(self) -> dict[str, Any]:
        """Return the call with its arguments parsed; a text that is no JSON stays as it is."""
        arguments: Any = self.function.arguments
        with suppress(ValueError):
            arguments = json.loads(arguments)
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class ChatMessage(Body):
    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it: its content one text, its empty fields left out."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        others = {name: value for name, value in (self.model_extra or {}).items() if value not in (None, [], "")}
        if self.tool_calls:
            others["tool_calls"] = [each.for_template() for each in self.tool_calls]
        return {"role": self.role, "content": content, **others}


class Tool(Body):
    type: Literal["function"]
    function: Named


class ChosenTool(Tool):
    """Tool that must be called."""


class StreamOptions(Body):
    include_usage: bool | None = None


class SamplingBody(Body):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=_MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=_MOST_STOPS)] | None = None
    ignore_eos: bool | None = None

    def params(self, default_max_tokens: int) -> SamplingParams:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "max_tokens": default_max_tokens if self.most_tokens is None else self.most_tokens,
            "stop": stop,
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens


class AskingBody(SamplingBody):
    """Fields that chats and completions share."""

    model: str
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def num_top(self) -> int | None:
        """Return how many of the best tokens to tell beside each log-prob; None without log-probs."""
        raise NotImplementedError


class ChatBody(AskingBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    required_prefix_token_ids: list[TokenId] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None

    @property
    def num_top(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def must_call(self) -> bool:
        if self.tool_choice == "required" and not self.tools:
            raise InvalidRequest("tool_choice", "required", "needs tools")
        return self.tool_choice == "required" or self.name_of_tool is not None

    @property
    def name_of_tool(self) -> str | None:
        """Return the name of the tool that must be called, if the request names one."""
        if not isinstance(self.tool_choice, ChosenTool):
            return None
        name = self.tool_choice.function.name
        if name not in [tool.function.name for tool in self.tools or ()]:
            raise InvalidRequest("tool_choice", name, "is not among the tools")
        return name

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Return what the chat template gets beside the messages."""
        given = self.chat_template_kwargs or {}
        if "tools" in given:
            raise InvalidRequest("chat_template_kwargs", "tools", "belong into the field tools")
        return given | ({"tools": [tool.model_dump() for tool in self.tools]} if self.offers_tools else {})  # type: ignore[union-attr]

    @property
    def offers_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(AskingBody):
    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: NumTop | None = None

    @property
    def num_top(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        several = isinstance(self.prompt, list) and bool(self.prompt) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if several else [self.prompt]  # type: ignore[arg-type, list-item]


class GenerateParams(SamplingBody):
    logprobs: Literal[0, 1] | None = None
    skip_special_tokens: bool | None = None  # there is no text


class GenerateBody(Body):
    model: str
    token_ids: list[TokenId]
    sampling_params: GenerateParams
    stream: Literal[False] | None = None


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = True


_B = TypeVar("_B", bound=Body)


def read(kind: type[_B], content: bytes) -> _B:
    """Return a checked body. Raise InvalidRequest, naming the field, also for a value that is not served."""
    try:
        body = kind.model_validate_json(content)
    except ValidationError as error:
        raise _named(error) from None
    _refuse_unserved(body)
    if isinstance(body, SamplingBody):
        body.params(1)
    if isinstance(body, GenerateBody):
        _refuse_unserved(body.sampling_params)
        body.sampling_params.params(1)
    return body


def _refuse_unserved(body: Body) -> None:
    for name, value in (body.model_extra or {}).items():
        if name in _WITHOUT_EFFECT or value is None or value in _NEUTRAL.get(name, ()):
            continue
        problem = "is not served" if name in _NEUTRAL else "is unknown"
        raise InvalidRequest(name, value, problem)


def _named(error: ValidationError) -> InvalidRequest:
    """Return the problem that lies deepest, which is that of the alternative meant."""
    first = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
    place = [part for part in first["loc"] if isinstance(part, int) or not (part in _TAGS or "[" in part)]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    return InvalidRequest(field or "body", first["input"], first["msg"][:1].lower() + first["msg"][1:])

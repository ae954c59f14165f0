"""Tool calls through the door, of a small model that knows a conversation by heart."""

import copy
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from chats import Served, chat_engine, serving, taught, tool_tokenizer
from openai import BadRequestError
from openai.types.chat import ChatCompletion

from rlhfspec.door.tools import ToolCalls
from rlhfspec.errors import InvalidRequest

ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>{"name": "add", "arguments": {"b": 2, "a":2}}</tool_call>'
TALK = f"add <user>2+2<eos>\n<assistant>{CALL}<eos>\n<tool>4<eos>\n<assistant>It is 4.<eos>"
BROKEN = 'add <user>5<eos>\n<assistant>so <tool_call>{"name": </tool_call><eos>'
ASK: list[Any] = [{"role": "user", "content": "2+2"}]
TOKENIZER = tool_tokenizer()
Serving = Callable[[], AbstractAsyncContextManager[Served]]


@pytest.fixture(scope="module")
def model() -> Any:
    return taught(TOKENIZER, TALK, BROKEN)


@pytest.fixture
def tool_serving(model: Any) -> Serving:
    return lambda: serving(chat_engine(copy.deepcopy(model), TOKENIZER), tools=ToolCalls("qwen3", TOKENIZER))


async def say(served: Served, messages: list[Any], **more: Any) -> Any:
    given: dict[str, Any] = {"model": "policy", "tools": [ADD], "temperature": 0, "messages": messages}
    return await served.client.chat.completions.create(**given | more)


async def test_a_tool_loop_goes_on_with_the_ids_that_were_sampled(tool_serving: Serving) -> None:
    """The model's JSON is not the template's, so its text could not be encoded again."""
    async with tool_serving() as served:
        body = {"return_token_ids": True}
        first = await say(served, ASK, extra_body=body)
        ChatCompletion.model_validate(first.model_dump())
        [choice] = first.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        [call] = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 2})
        answer = {"role": "tool", "tool_call_id": call.id, "content": "4"}
        second = await say(served, [*ASK, choice.message.model_dump(exclude_none=True), answer], extra_body=body)
        [last] = second.choices
        assert (last.finish_reason, last.message.content, last.message.tool_calls) == ("stop", "It is 4.", None)
        said, told = choice.model_dump(), last.model_dump()
        new = TOKENIZER.encode("\n<tool>4<eos>\n<assistant>", add_special_tokens=False)
        assert told["prompt_token_ids"] == [*said["prompt_token_ids"], *said["token_ids"], *new]
        assert TOKENIZER.decode(told["prompt_token_ids"] + told["token_ids"]) == TALK
        assert served.door.conversations.counts == {"first": 1, "continued": 1}


async def test_a_streamed_call_goes_out_whole(tool_serving: Serving) -> None:
    async with tool_serving() as served:
        whole = (await say(served, ASK)).choices[0]
        chunks = [chunk.choices[0] async for chunk in await say(served, ASK, stream=True)]
        assert not any(chunk.delta.content for chunk in chunks)
        [calls] = [chunk.delta.tool_calls for chunk in chunks if chunk.delta.tool_calls]
        assert [call.function.model_dump() for call in calls] == [
            call.function.model_dump() for call in whole.message.tool_calls
        ]
        assert chunks[-1].finish_reason == "tool_calls"
        assert [token for chunk in chunks for token in chunk.model_dump()["token_ids"]] == (
            whole.model_dump()["token_ids"]
        )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
async def test_a_call_that_must_be_made_is_begun_for_the_model(choice: Any, tool_serving: Serving) -> None:
    async with tool_serving() as served:
        answer = (await say(served, ASK, tool_choice=choice, extra_body={"return_token_ids": True})).choices[0]
        assert json.loads(answer.message.tool_calls[0].function.arguments) == {"a": 2, "b": 2}
        told = answer.model_dump()
        begun = TOKENIZER.decode(told["prompt_token_ids"]).partition("<assistant>")[2]
        assert begun == '<tool_call>{"name": "' + ("add" if choice != "required" else "")
        assert begun + TOKENIZER.decode(told["token_ids"]) == CALL + "<eos>"


async def test_a_malformed_call_stays_text_and_is_counted(tool_serving: Serving) -> None:
    async with tool_serving() as served:
        answer = (await say(served, [{"role": "user", "content": "5"}])).choices[0]
        assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
        assert answer.message.content.startswith('so <tool_call>{"name": </tool_call>')
        assert served.door.conversations.counts["malformed calls"] == 1


async def test_text_beside_tools_is_cut_at_a_stop_string(tool_serving: Serving) -> None:
    async with tool_serving() as served:
        cut = (await say(served, [{"role": "user", "content": "5"}], stop=["o"])).choices[0]
        assert (cut.message.content, cut.message.tool_calls) == ("s", None)


async def test_tools_that_are_not_offered_or_cannot_be_served_are_refused(tool_serving: Serving, model: Any) -> None:
    async with tool_serving() as served:
        with pytest.raises(BadRequestError, match="tool_choice: needs tools"):
            await say(served, ASK, tools=[], tool_choice="required")
        text = (await say(served, ASK, tool_choice="none")).choices[0]
        assert text.message.tool_calls is None
        with pytest.raises(BadRequestError, match="tool_choice: is not among the tools"):
            await say(served, ASK, tool_choice={"type": "function", "function": {"name": "multiply"}})
    async with serving() as served:
        with pytest.raises(BadRequestError, match="--tool-parser"):
            await say(served, ASK)
    plain = tool_tokenizer()
    plain.chat_template = plain.chat_template.replace("message.tool_calls or []", "[]")
    async with serving(chat_engine(copy.deepcopy(model), plain), tools=ToolCalls("qwen3", plain)) as served:
        with pytest.raises(BadRequestError, match="chat template has no tool calls"):
            await say(served, ASK, tool_choice="required")
    with pytest.raises(InvalidRequest, match=r"--tool-parser: must be among qwen3, qwen3.5"):
        ToolCalls("hermes", plain)

"""Agent libraries complete a loop of tools through the door, unchanged."""

import asyncio
import copy
from typing import Any

import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from chats import TOKEN, chat_engine, serving, taught, tool_tokenizer, windowed_model
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

from rlhfspec.door.tools import ToolCalls

ASK = "What is 2+2?"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call><eos>'
END = '<tool_call>{"name": "final_answer", "arguments": {"answer": "4"}}</tool_call><eos>'
# The ends of the prompts, which is all that the model sees. smolagents writes calls and their results as text.
OF_SMOLAGENTS = (
    "4. Never re-do a tool call that you previously did with the exact same parameters.\n\n"
    f"Now Begin!<eos>\n<user>New task:\n{ASK}<eos>\n<assistant>{CALL}",
    "-0', 'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 2, 'b': 2}}}]<eos>\n"
    f"<user>Observation:\n4<eos>\n<assistant>{END}",
)
OF_OPENAI_AGENTS = (
    f"add <system>You add.<eos>\n<user>{ASK}<eos>\n<assistant>{CALL}\n<tool>4<eos>\n<assistant>It is 4.<eos>"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tool_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    return taught(tokenizer, *OF_SMOLAGENTS, OF_OPENAI_AGENTS, model=windowed_model(tokenizer))


def agent_serving(model: Any, tokenizer: Any) -> Any:
    engine = chat_engine(copy.deepcopy(model), tokenizer, max_context=16384, max_sequences=2)
    return serving(engine, tools=ToolCalls("qwen3", tokenizer))


@pytest.mark.parametrize("streams", [False, True])
async def test_a_tool_calling_agent_of_smolagents(streams: bool, model: Any, tokenizer: Any) -> None:
    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    async with agent_serving(model, tokenizer) as served:
        speaks = OpenAIServerModel(model_id="policy", api_base=f"{served.url}/v1", api_key=TOKEN, temperature=0)
        agent = ToolCallingAgent(tools=[add], model=speaks, max_steps=3, stream_outputs=streams, verbosity_level=0)
        assert await asyncio.to_thread(agent.run, ASK) == "4"


@pytest.mark.parametrize("streams", [False, True])
async def test_a_runner_of_openai_agents(streams: bool, model: Any, tokenizer: Any) -> None:
    set_tracing_disabled(True)

    @function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async with agent_serving(model, tokenizer) as served:
        speaks = OpenAIChatCompletionsModel(model="policy", openai_client=served.client)
        agent = Agent(
            name="adder",
            instructions="You add.",
            tools=[add],
            model=speaks,
            model_settings=ModelSettings(temperature=0),
        )
        if streams:
            running = Runner.run_streamed(agent, ASK)
            async for _ in running.stream_events():
                pass
            assert running.final_output == "It is 4."
        else:
            assert (await Runner.run(agent, ASK)).final_output == "It is 4."
        assert served.door.conversations.counts == {"first": 1, "continued": 1}

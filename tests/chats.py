"""A small model that chats, served by the door to real clients."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from aiohttp.test_utils import TestServer
from openai import AsyncOpenAI
from runs import train
from transformers import MistralForCausalLM

from rlhfspec.door.calls import EngineThread
from rlhfspec.door.server import PolicyDoor
from rlhfspec.door.tools import ToolCalls
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import Engine, make_engine
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.tiny import random_model
from rlhfspec.tiny.random_models import CONFIGS
from rlhfspec.tiny.tokenizer import EOS, VOCAB_SIZE, hugging_face_tokenizer

TOKEN = "a-token-of-the-tests"
MOST_LESSONS = 2000
LEARNT = 0.1  # surprise at any token that is known by heart
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<eos>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_tokenizer(template: str = TEMPLATE) -> Any:
    tokenizer = hugging_face_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def tool_tokenizer() -> Any:
    """Return a tokenizer with tokens for tool calls, after all others."""
    tokenizer = chat_tokenizer(WITH_TOOLS)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return tokenizer


def chat_engine(model: Any = None, tokenizer: Any = None, **options: Any) -> Engine:
    model = model or random_model("llama", seed=0, vocab_size=VOCAB_SIZE)
    model.generation_config.eos_token_id = EOS
    usual = {"max_sequences": 4, "max_context": 256, "speculation": "off", "profile": False}
    return make_engine(model, EngineConfig(**usual | options), tokenizer=tokenizer or chat_tokenizer())


def taught(tokenizer: Any, *texts: str, model: Any = None) -> Any:
    """Return a small model that knows by heart what follows the first <assistant> of each text."""
    torch.manual_seed(0)
    model = (model or random_model("llama", seed=0, vocab_size=len(tokenizer))).train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(MOST_LESSONS):
        surprises = []
        for text in texts:
            asked, answers = text.split("<assistant>", 1)
            given, learnt = (
                tokenizer.encode(part, add_special_tokens=False) for part in (asked + "<assistant>", answers)
            )
            logits = model(torch.tensor([given + learnt])).logits[0, len(given) - 1 : -1]
            surprises.append(torch.nn.functional.cross_entropy(logits, torch.tensor(learnt), reduction="none"))
        if max(each.max() for each in surprises) < LEARNT:
            return model.eval().requires_grad_(False)
        optimizer.zero_grad()
        sum(each.mean() for each in surprises).backward()
        optimizer.step()
    raise AssertionError("not learnt")


def windowed_model(tokenizer: Any) -> Any:
    """Return a random model that sees 2 x 48 tokens back, for prompts of any length."""
    config = CONFIGS["mistral"]()
    torch.manual_seed(0)
    config.vocab_size, config.sliding_window, config.max_position_embeddings = len(tokenizer), 48, 32768
    return MistralForCausalLM(config)


def run_that_chats(job_file: Path) -> Path:
    """Return the folder of a run of one step, whose tokenizer has a chat template."""
    for name in ("policy", "drafter"):
        chat_tokenizer().save_pretrained(Path(job_file.parent, name))
        random_model("llama", seed=0, vocab_size=VOCAB_SIZE).save_pretrained(Path(job_file.parent, name))
    train(job_file, "run", f"model.path={job_file.parent / 'policy'}", "training.steps=1")
    return job_file.parent / "run"


class Served:
    """PolicyDoor over a random model, with a client."""

    def __init__(self, engine: Engine, most_kept: int, tools: ToolCalls | None, run: RunFolder | None) -> None:
        self.engine = engine
        self.thread = EngineThread(engine, most_kept=most_kept)
        self.door = PolicyDoor(
            self.thread.calls, engine.state.tokenizer, name="tiny", token=TOKEN, tools=tools, run=run
        )
        self.server = TestServer(self.door.app(), handler_cancellation=True)

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    client: AsyncOpenAI


@asynccontextmanager
async def serving(
    engine: Engine | None = None, *, most_kept: int = 8, tools: ToolCalls | None = None, run: RunFolder | None = None
) -> AsyncIterator[Served]:
    served = Served(engine or chat_engine(), most_kept, tools, run)
    await served.server.start_server()
    try:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key=TOKEN, max_retries=0) as served.client:
            yield served
    finally:
        await served.server.close()
        served.thread.close()

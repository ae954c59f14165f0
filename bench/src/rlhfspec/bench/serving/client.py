"""HTTP client of `rlhfspec bench serve`, which times the tokens of streamed answers as they arrive."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from rlhfspec.bench.serving.load import ArrivingChat
from rlhfspec.bench.serving.results import TimedAnswer
from rlhfspec.bench.worker import WorkerFailed
from rlhfspec.door.server import MODEL_NAME

TOKEN = "bench"
_PATIENCE_SECONDS = 600.0  # for one answer


async def answers_to(chats: Sequence[ArrivingChat], *, url: str, body: Mapping[str, Any]) -> list[TimedAnswer]:
    """Send each chat when it arrives, whether or not earlier ones are answered. `body`: further fields of requests."""
    async with aiohttp.ClientSession(
        url,
        headers={"Authorization": f"Bearer {TOKEN}"},
        timeout=aiohttp.ClientTimeout(total=_PATIENCE_SECONDS),
        connector=aiohttp.TCPConnector(limit=0),
    ) as session:
        began = time.perf_counter()
        return await asyncio.gather(*(_answer(session, chat, began + chat.at, body) for chat in chats))


async def _answer(
    session: aiohttp.ClientSession, chat: ArrivingChat, at: float, body: Mapping[str, Any]
) -> TimedAnswer:  # fmt: skip
    await asyncio.sleep(at - time.perf_counter())
    asked = {
        "model": MODEL_NAME, "messages": [{"role": "user", "content": chat.text}], "max_tokens": chat.num_tokens,
        "seed": chat.seed, "temperature": 1.0, "ignore_eos": True, "stream": True, **body,
    }  # fmt: skip
    times: list[float] = []
    token_ids: list[int] = []
    async with session.post("/v1/chat/completions", json=asked) as response:
        if response.status != 200:
            raise WorkerFailed(f"the server answered {response.status}: {await response.text()}")
        async for line in response.content:
            chunk = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: {") else {}
            gained = [token for choice in chunk.get("choices", ()) for token in choice.get("token_ids") or ()]
            if gained:
                times.append(time.perf_counter())
                token_ids += gained
    if len(token_ids) != chat.num_tokens:
        raise WorkerFailed(f"the server gave {len(token_ids)} tokens instead of {chat.num_tokens}")
    return TimedAnswer(
        ttft=times[0] - at,
        tpot=(times[-1] - times[0]) / (len(token_ids) - 1),
        gap=max((after - before for before, after in itertools.pairwise(times)), default=0.0),
        num_tokens=len(token_ids),
        digest=hashlib.sha256(repr(token_ids).encode()).hexdigest()[:16],
    )

"""Requests that are sent again with the same idempotency key."""

import asyncio
from typing import Any

import aiohttp
import pytest
from chats import TOKEN, Served, chat_engine, serving
from coroutines import until
from openai import BadRequestError, ConflictError

from rlhfspec.door import retries

CHAT: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "2+2="}], "max_tokens": 20}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": {"model": "policy", "prompt": "ab", "logprobs": 1}}


async def sent(served: Served, path: str, body: Any, key: str = "k") -> bytes:
    headers = {"Authorization": f"Bearer {TOKEN}", "Idempotency-Key": key}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{served.url}{path}", json=body) as answer,
    ):
        assert answer.status == 200
        assert answer.content_type == ("text/event-stream" if body.get("stream") else "application/json")
        return await answer.read()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_request_sent_again_gets_its_answer_without_running(path: str, stream: bool) -> None:
    body = PATHS[path] | {"stream": stream}
    async with serving() as served:
        first = await sent(served, path, body)
        run = served.engine.stats().num_generated_tokens
        assert await sent(served, path, body) == first
        assert served.engine.stats().num_generated_tokens == run
        assert await sent(served, path, body, key="other") != first


async def test_tries_at_the_same_time_run_once() -> None:
    async with serving() as served:
        answers = await asyncio.gather(*(sent(served, "/v1/chat/completions", CHAT) for _ in range(4)))
        assert len(set(answers)) == 1


async def test_another_body_with_the_same_key_is_refused_and_not_tried_again() -> None:
    async with serving() as served:
        client, key = served.client.with_options(max_retries=2), {"Idempotency-Key": "k"}
        with pytest.raises(BadRequestError, match="top_p"):
            await client.chat.completions.create(**CHAT, top_p=0, extra_headers=key)
        await client.chat.completions.create(**CHAT, extra_headers=key)
        with pytest.raises(ConflictError, match="another body") as refused:
            await client.chat.completions.create(**CHAT, seed=5, extra_headers=key)
        assert refused.value.response.headers["x-should-retry"] == "false"
        with pytest.raises(BadRequestError, match="Idempotency-Key"):
            await client.chat.completions.create(**CHAT, extra_headers={"Idempotency-Key": "k" * 300})


async def test_an_answer_that_was_cut_off_comes_again_with_the_same_tokens() -> None:
    """From this door and from the next, since the key stands for the seed."""
    body = {"extra_headers": {"Idempotency-Key": "k"}, "extra_body": {"ignore_eos": True}}
    told = []
    for _ in range(2):
        async with serving(chat_engine(max_context=500)) as served:
            create = served.client.chat.completions.create
            stream = await create(**CHAT | {"max_tokens": 400}, stream=True, **body)  # type: ignore[call-overload]
            cut = [token async for token in _first_tokens(stream)]
            await stream.close()
            await until(lambda: not served.engine.has_work)
            again = await create(**CHAT | {"max_tokens": 400}, stream=True, **body)  # type: ignore[call-overload]
            tokens = [token async for chunk in again for token in chunk.choices[0].model_dump()["token_ids"]]
            assert len(tokens) == 400
            assert tokens[: len(cut)] == cut
            told.append(tokens)
    assert told[0] == told[1]


async def _first_tokens(stream: Any) -> Any:
    async for chunk in stream:
        if tokens := chunk.choices[0].model_dump()["token_ids"]:
            for token in tokens:
                yield token
            return


@pytest.mark.parametrize(("name", "most"), [("_SECONDS", 0.0), ("_MOST_KEYS", 1), ("_MOST_BYTES", 1)])
async def test_old_answers_are_forgotten(name: str, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, name, most)
    async with serving() as served:
        first = await sent(served, "/v1/chat/completions", CHAT)
        await sent(served, "/v1/chat/completions", CHAT, key="another")
        run = served.engine.stats().num_generated_tokens
        assert await sent(served, "/v1/chat/completions", CHAT) != first, "it has another id"
        assert served.engine.stats().num_generated_tokens > run

"""The door: clients, conversations, refusals, streams and failures, with a real engine."""

import asyncio
import json
import math
import os
from pathlib import Path
from threading import Event
from typing import Any

import aiohttp
import pytest
from chats import TOKEN, Served, chat_engine, chat_tokenizer, serving
from coroutines import until
from hypothesis import given, settings, strategies as st
from openai import APIError, APIStatusError, BadRequestError, NotFoundError, RateLimitError
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from rlhfspec.door import server as server_module
from rlhfspec.door.server import _seed_of
from rlhfspec.engine import Engine, SamplingParams
from rlhfspec.errors import InvalidRequest
from rlhfspec.messages.access.connections import CLIENT_TOKEN_VARIABLE, client_token_file
from rlhfspec.worker.worker import token_of_clients

ASK: list[Any] = [{"role": "user", "content": "2+2="}]
ASKED = "<user>2+2=<eos>\n<assistant>"
PROMPT = chat_tokenizer().encode(ASKED, add_special_tokens=False)


def generated(prompt: list[int], *, seed: int, index: int = 0, **params: Any) -> Any:
    """Return a new engine's response to a prompt, which the door's must equal."""
    [done] = chat_engine().generate([prompt], SamplingParams(**params), seeds=[_seed_of(seed, index, prompt)])
    return done


def slowed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Let every step wait a moment, so that no response ends before the test has looked."""
    step, pace = engine.step, Event()

    def slow() -> Any:
        pace.wait(0.05)
        return step()

    monkeypatch.setattr(engine, "step", slow)
    return engine


async def raw(served: Served, path: str, body: Any, token: str = TOKEN) -> tuple[int, Any, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session,
        session.post(f"{served.url}{path}", data=data) as answer,
    ):
        text = await answer.text()
        return answer.status, json.loads(text) if text.startswith("{") else text, answer.headers


# ---- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{"temperature": 0}, {"temperature": 0.7, "top_p": 0.9}, {"stop": ["e", "a"]}])
async def test_a_chat_has_the_tokens_of_the_engine_and_the_types_of_openai(asked: Any) -> None:
    async with serving() as served:
        create = served.client.chat.completions.create
        more = {"return_token_ids": True, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
        answer = await create(
            model="policy", messages=ASK, seed=5, max_tokens=20, n=2, logprobs=True, top_logprobs=3, extra_body=more,
            **asked,
        )  # fmt: skip
        ChatCompletion.model_validate(answer.model_dump())
        for index, choice in enumerate(answer.choices):
            given = {name: tuple(value) if name == "stop" else value for name, value in asked.items()}
            done = generated(PROMPT, seed=5, index=index, max_tokens=20, **given)
            assert choice.message.content == done.text
            assert choice.finish_reason == done.finish_reason
            told = choice.model_dump()
            assert tuple(told["token_ids"]) == done.token_ids
            assert told["prompt_token_ids"] == PROMPT
            assert told["weights_versions"] == [0] * len(done.token_ids)
            assert told["seed"] == 5
            logprobs = told["logprobs"]
            assert tuple(each["logprob"] for each in logprobs["content"]) == done.tempered_log_probs
            assert tuple(logprobs["untempered"]) == done.log_probs
            for each in logprobs["content"]:
                best = each["top_logprobs"]
                assert [other["logprob"] for other in best] == sorted((o["logprob"] for o in best), reverse=True)
                assert len(best) == (1 if asked.get("temperature") == 0 else 3 if "stop" in asked else len(best))
                assert all(math.isfinite(other["logprob"]) for other in best)
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens == len(PROMPT)
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


async def test_a_stream_says_what_the_whole_answer_says() -> None:
    asked: Any = {"model": "policy", "messages": ASK, "seed": 3, "max_tokens": 30, "n": 2, "logprobs": True}
    async with serving() as served:
        create = served.client.chat.completions.create
        whole = await create(**asked)
        chunks = [chunk async for chunk in await create(**asked, stream=True, stream_options={"include_usage": True})]
        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk.model_dump())
        assert chunks[-1].choices == []
        assert chunks[-1].usage == whole.usage
        for index, choice in enumerate(whole.choices):
            mine = [each for chunk in chunks for each in chunk.choices if each.index == index]
            assert "".join(each.delta.content or "" for each in mine) == choice.message.content
            told = [each.model_dump() for each in mine]
            assert [token for each in told for token in each["token_ids"]] == choice.model_dump()["token_ids"]
            assert mine[0].delta.role == "assistant"
            assert [each.finish_reason for each in mine if each.finish_reason] == [choice.finish_reason]
            assert choice.logprobs is not None
            assert [each for part in mine if part.logprobs for each in part.logprobs.content or ()] == (
                choice.logprobs.content
            )


async def test_completions_of_texts_and_ids_and_a_drawn_seed_that_can_be_given_again() -> None:
    async with serving() as served:
        create = served.client.completions.create
        ids = chat_tokenizer().encode("ab")
        more = {"return_tokens_as_token_ids": True}
        drawn = await create(model="policy@0", prompt=["ab", "c"], max_tokens=9, logprobs=2, extra_body=more)
        Completion.model_validate(drawn.model_dump())
        logprobs = drawn.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.top_logprobs is not None
        said = logprobs.token_logprobs or []
        assert all(max(best.values()) > value - 1e-5 for best, value in zip(logprobs.top_logprobs, said, strict=True))
        seed = drawn.choices[0].model_dump()["seed"]
        again = await create(model="policy", prompt=[ids, chat_tokenizer().encode("c")], max_tokens=9, seed=seed)
        assert [each.text for each in again.choices] == [each.text for each in drawn.choices]
        assert (await create(model="policy", prompt=ids, max_tokens=9, seed=seed)).choices[0].text == (
            drawn.choices[0].text
        )
        assert len((await create(model="policy", prompt="ab", extra_body={"ignore_eos": True})).choices[0].text) > 0


async def test_token_ids_in_and_out() -> None:
    """As verifiers asks: a log-prob for each token, named by its id."""
    params = {"max_tokens": 7, "temperature": 0.5, "logprobs": 1, "skip_special_tokens": False, "seed": 4}
    async with serving() as served:
        body = {"model": "policy", "token_ids": PROMPT, "sampling_params": params}
        status, answer, _ = await raw(served, "/inference/v1/generate", body)
        assert status == 200
        [choice] = answer["choices"]
        done = generated(PROMPT, seed=4, max_tokens=7, temperature=0.5)
        assert tuple(choice["token_ids"]) == done.token_ids
        assert [each["token"] for each in choice["logprobs"]["content"]] == [f"token_id:{id}" for id in done.token_ids]
        assert tuple(each["logprob"] for each in choice["logprobs"]["content"]) == done.tempered_log_probs
        for asked in ({"messages": ASK}, {"prompt": ASKED, "add_special_tokens": False}):
            status, answer, _ = await raw(served, "/tokenize", asked)
            assert (status, answer["tokens"], answer["count"]) == (200, PROMPT, len(PROMPT))
        [card] = (await served.client.models.list()).data
        assert (card.id, card.model_dump()["max_model_len"]) == ("policy", 256)
        assert (await served.client.models.retrieve("policy@0")).id == "policy"


def test_choices_turns_and_seeds_have_noise_of_their_own() -> None:
    cases = ((1, 0, [1]), (1, 1, [1]), (1, 0, [2]), (1, 0, [1, 2]), (2, 0, [1]))
    assert len({_seed_of(*case) for case in cases}) == len(cases)


# ---- conversations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most_kept", [8, 1, 0])
async def test_a_conversation_runs_only_new_tokens_and_equals_whole_prompts(most_kept: int) -> None:
    """With room for one kept conversation, the two take it from each other, and the answers stay the same."""
    async with serving(most_kept=most_kept) as served:
        create = served.client.chat.completions.create
        talks: list[list[Any]] = [[*ASK], [{"role": "user", "content": "another"}]]
        before: list[list[int]] = [[], []]
        for turn in range(3):
            for index, messages in enumerate(talks):
                run = served.engine.stats().num_prefill_tokens
                answer = await create(
                    model="policy", messages=messages, seed=turn, max_tokens=12, extra_body={"return_token_ids": True}
                )
                told = answer.choices[0].model_dump()
                prompt, tokens = told["prompt_token_ids"], told["token_ids"]
                assert prompt[: len(before[index])] == before[index]
                assert tuple(tokens) == generated(prompt, seed=turn, max_tokens=12).token_ids
                num_run = served.engine.stats().num_prefill_tokens - run
                assert num_run <= len(prompt)
                if most_kept == 8:
                    assert num_run <= len(prompt) - len(before[index]) + 1
                before[index] = [*prompt, *tokens]
                messages += [{"role": "assistant", "content": answer.choices[0].message.content}, *ASK]
        assert served.door.conversations.counts == {"first": 2, "continued": 4}
        assert served.engine.stats().num_staying <= most_kept
        served.engine.check_integrity()


async def test_ids_that_the_prompt_must_begin_with_are_checked() -> None:
    async with serving() as served:
        body = {"model": "policy", "messages": ASK, "max_tokens": 2}
        for wanted, status in ((PROMPT[:5], 200), ([9, *PROMPT[:5]], 400)):
            found, answer, _ = await raw(served, "/v1/chat/completions", body | {"required_prefix_token_ids": wanted})
            assert found == status
        assert answer["error"]["param"] == "required_prefix_token_ids"


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", "hot"), ("top_p", 0), ("top_k", -2), ("top_k", 1.5), ("n", 0), ("n", 999),
        ("seed", -1), ("seed", 1 << 63), ("max_tokens", 0), ("stop", [""]), ("stop", 3), ("stop_token_ids", [260]),
        ("stop_token_ids", [5] * 17), ("stream", "yes"), ("skip_special_tokens", False), ("parallel_tool_calls", False),
        ("required_prefix_token_ids", [1 << 70]),
        ("messages", []), ("messages", "hi"), ("messages", [{"content": "x"}]), ("frequency_penalty", 0.5),
        ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("response_format", {"type": "json_object"}),
        ("top_logprobs", 21), ("logit_bias", {"5": 1}), ("temprature", 1), ("chat_template_kwargs", {"tokenize": True}),
        ("messages[0].content[0].type", [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
    ],
)  # fmt: skip
async def test_a_value_that_is_not_served_is_refused_and_its_field_named(field: str, value: Any) -> None:
    async with serving() as served:
        body = {"model": "policy", "messages": ASK, field.partition("[")[0]: value}
        status, answer, _ = await raw(served, "/v1/chat/completions", body)
        assert status == 400, answer
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["param"].startswith(field)
        assert not served.engine.has_work


@pytest.mark.parametrize("asked", [{"top_k": 10**30}, {"top_p": 1e-60}, {"temperature": 1e-300}])
async def test_extreme_values_are_those_that_the_engine_samples_with(asked: dict[str, float]) -> None:
    body = {"model": "policy", "messages": ASK, "max_tokens": 3, "logprobs": True, "top_logprobs": 2} | asked
    async with serving() as served:
        status, answer, _ = await raw(served, "/v1/chat/completions", body)
        assert status == 200, answer
        content = answer["choices"][0]["logprobs"]["content"]
        assert [len(each["top_logprobs"]) for each in content] == [2 if "top_k" in asked else 1] * len(content)
        assert all(each["top_logprobs"][0]["logprob"] >= each["logprob"] - 1e-5 for each in content)
        ids = {"model": "policy", "token_ids": [1 << 70], "sampling_params": {}}
        assert (await raw(served, "/inference/v1/generate", ids))[0] == 400


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "min_p", "user", "metadata", "logit_bias"])
async def test_neutral_values_are_accepted(name: str) -> None:
    neutral = {"user": "me", "metadata": {"a": "b"}, "logit_bias": {}}
    async with serving() as served:
        body = {"model": "policy", "messages": ASK, "max_tokens": 1, name: neutral.get(name, 0), "top_logprobs": None}
        assert (await raw(served, "/v1/chat/completions", body))[0] == 200


async def test_a_wrong_model_token_or_length_is_refused_as_openai_refuses_it() -> None:
    async with serving() as served:
        create = served.client.chat.completions.create
        with pytest.raises(NotFoundError, match="policy@0"):
            await create(model="policy@1", messages=ASK)
        for length, limit in ((300, None), (10, 300)):
            with pytest.raises(APIStatusError) as refused:
                await create(model="policy", messages=[{"role": "user", "content": "x" * length}], max_tokens=limit)
            assert (refused.value.status_code, refused.value.code) == (400, "context_length_exceeded")
        assert (await raw(served, "/v1/chat/completions", {}, token="wrong"))[0] == 401
        assert (await raw(served, "/v1/chat", {}))[0] == 404


async def test_more_open_responses_than_allowed_are_asked_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_MOST_OPEN", 3)
    async with serving(slowed(chat_engine(max_context=500), monkeypatch)) as served:
        create = served.client.chat.completions.create
        with pytest.raises(BadRequestError, match="n: at most 3 responses may be open"):
            await create(model="policy", messages=ASK, n=4)
        stream = await create(model="policy", messages=ASK, n=2, stream=True, extra_body={"ignore_eos": True})
        with pytest.raises(RateLimitError) as refused:
            await create(model="policy", messages=ASK, n=2)
        assert int(refused.value.response.headers["Retry-After"]) > 0
        await stream.close()
        await until(lambda: served.door.num_open == 0)
        await create(model="policy", messages=ASK, n=3, max_tokens=1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    "messages", "prompt", "token_ids", "sampling_params", "temperature", "top_p", "top_k", "max_tokens", "n", "seed",
    "stop", "stop_token_ids", "stream", "stream_options", "logprobs", "chat_template_kwargs", "tools",
]  # fmt: skip
VALID = {"model": "policy", "messages": ASK, "prompt": "x", "token_ids": [5], "max_tokens": 1, "sampling_params": {}}


@settings(max_examples=20)
@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3) | st.binary(max_size=20), max_size=20))
def test_malformed_bodies_are_refused_and_reach_no_engine(bodies: list[Any]) -> None:
    async def send() -> None:
        async with serving() as served:
            for changes in bodies:
                for path in ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/tokenize"):
                    status, answer, _ = await raw(
                        served, path, changes if isinstance(changes, bytes) else VALID | changes
                    )
                    assert status in (200, 400), answer
                    assert status == 200 or answer["error"]["message"]
            assert not served.engine.has_work

    asyncio.run(send())


# ---- clients that leave, engines that fail --------------------------------------------------------------------------


async def test_a_client_that_leaves_frees_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = slowed(chat_engine(max_context=500), monkeypatch)
    async with serving(engine) as served:
        create = served.client.chat.completions.create
        body = {"ignore_eos": True}
        stream = await create(model="policy", messages=ASK, stream=True, n=2, extra_body=body)
        async for _ in stream:
            break
        await until(lambda: engine.stats().num_running == 2)
        await stream.close()
        await until(lambda: (engine.has_work, served.door.num_open) == (False, 0))
        asking = asyncio.create_task(create(model="policy", messages=ASK, extra_body=body))
        await until(lambda: (engine.stats().num_running, served.door.num_open) == (1, 1))
        asking.cancel()
        await until(lambda: (engine.has_work, served.door.num_open) == (False, 0))
        engine.check_integrity()
        assert engine.stats().num_generated_tokens < 200, "nothing ran to its end"


async def test_a_silent_stream_is_kept_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_BEAT_SECONDS", 0.01)
    engine = chat_engine()
    step, may_go = engine.step, asyncio.Event()
    loop = asyncio.get_running_loop()

    def waits() -> Any:
        asyncio.run_coroutine_threadsafe(may_go.wait(), loop).result()
        return step()

    monkeypatch.setattr(engine, "step", waits)
    async with serving(engine) as served, aiohttp.ClientSession() as session:
        body = {"model": "policy", "messages": ASK, "stream": True, "max_tokens": 1}
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with session.post(f"{served.url}/v1/chat/completions", json=body, headers=headers) as answer:
            lines = [await answer.content.readline() for _ in range(8)]
            assert lines.count(b": waiting\n") >= 2
            may_go.set()
            assert b"[DONE]" in await answer.content.read()


async def test_an_engine_that_fails_ends_every_call_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = chat_engine(max_context=500)
    step, fails = engine.step, asyncio.Event()

    def fail() -> Any:
        if fails.is_set():
            raise RuntimeError("out of memory")
        return step()

    monkeypatch.setattr(engine, "step", fail)
    async with serving(engine) as served:
        create = served.client.chat.completions.create
        stream = await create(model="policy", messages=ASK, stream=True, extra_body={"ignore_eos": True})
        with pytest.raises(APIError, match="out of memory"):  # noqa: PT012
            async for _ in stream:
                fails.set()
        with pytest.raises(APIStatusError) as refused:
            await create(model="policy", messages=ASK)
        assert refused.value.status_code == 503
        assert "out of memory" in refused.value.message
        async with aiohttp.ClientSession() as session, session.get(f"{served.url}/healthz") as health:
            assert health.status == 503


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_a_token_may_end_in_a_line_break_and_must_not_be_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client_token_file(tmp_path).write_text("ours")
    monkeypatch.setenv(CLIENT_TOKEN_VARIABLE, "mine\n")
    assert server_module.client_token() == token_of_clients(tmp_path, os.environ) == "mine"
    assert token_of_clients(tmp_path, {}) == "ours"
    monkeypatch.setenv(CLIENT_TOKEN_VARIABLE, "\n")
    assert len(server_module.client_token()) > 20
    with pytest.raises(InvalidRequest, match=r"spec\.roles\.gateway\.tokenSecret: .* must not be empty"):
        token_of_clients(tmp_path, os.environ)

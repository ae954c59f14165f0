"""HTTP server of a policy for OpenAI clients."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from rlhfspec.door.answers import Response, Shape, generated, problem
from rlhfspec.door.bodies import (
    AskingBody,
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerateBody,
    SamplingBody,
    TokenizeBody,
    read,
)
from rlhfspec.door.calls import PolicyCalls
from rlhfspec.door.conversations import ChatPrompt, Conversations
from rlhfspec.door.feedback import Feedback, Vote
from rlhfspec.door.page import ChatPage, address
from rlhfspec.door.retries import IDEMPOTENCY_KEY, STREAM_END, Handler, KeptStream, Retries
from rlhfspec.door.tools import ToolCalls
from rlhfspec.door.words import TokenTexts, Words
from rlhfspec.engine.base import Request
from rlhfspec.engine.scheduling.text import cut_at_stop
from rlhfspec.errors import InvalidRequest, RLHFSpecError
from rlhfspec.messages.access.connections import CLIENT_TOKEN_VARIABLE
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.stage.threads import ComputeThread

MODEL_NAME = "policy"  # of every door's model, beside its own name
_MOST_BYTES = 8 << 20  # of a request
_MOST_OPEN = 1024  # responses at a time; more are asked to come again
_RETRY_SECONDS = 2
_BEAT_SECONDS = 3.0  # between comments in a silent stream, so that proxies keep it open
_SEED_BITS = 53  # of a seed drawn here, which JavaScript reads without loss
_KEPT = ("Retry-After", "Allow", "x-should-retry")  # headers of a refusal
_COMPLETION_TOKENS = 16  # of a completion without a limit, as in OpenAI's API


class PolicyDoor:
    """Application that answers OpenAI clients. The caller serves `app()`."""

    def __init__(
        self, engine: PolicyCalls, tokenizer: Any, *, name: str, token: str = "", tools: ToolCalls | None = None,
        run: RunFolder | None = None,
    ) -> None:  # fmt: skip
        """Create the application. `token`: that of clients, by default `client_token()`.

        `run`: the folder that keeps the votes of people.
        """
        self.token = token or client_token()
        self._engine = engine
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)
        self._name = name
        self._tools = tools
        self._feedback = None if run is None else Feedback(run, name)
        self.conversations = Conversations(tokenizer, engine.limits.eos_token_ids)
        self.num_open = 0
        self._preparing = ComputeThread("prompts")  # renders and encodes text, which takes seconds if it is long

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=_MOST_BYTES)
        once = Retries().once
        app.add_routes(
            [
                web.get("/healthz", self._healthy),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name}", self._models),
                web.post("/v1/chat/completions", once(self._chat)),
                web.post("/v1/completions", once(self._complete)),
                web.post("/inference/v1/generate", self._generate),
                web.post("/tokenize", self._tokenize),
                web.post("/feedback", self._vote),
                *ChatPage().routes(),
            ]
        )
        return app

    # --- access --------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._refuse_strangers(request)
            return await handler(request)
        except web.HTTPException as error:
            return _refused(error.status, error.text or error.reason, headers=_kept(error.headers))
        except InvalidRequest as error:
            too_long = error.field in ("prompt_token_ids", "max_tokens") and "tokens" in str(error)
            return _refused(400, str(error), param=error.field, code="context_length_exceeded" if too_long else "")
        except RLHFSpecError as error:
            return _refused(503, str(error), kind="server_error")

    def _refuse_strangers(self, request: web.Request) -> None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        is_known = scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self.token.encode())
        if not is_known and request.path != "/healthz" and not ChatPage.is_at(request.path):
            raise web.HTTPUnauthorized(text="wrong or missing token: set the header Authorization: Bearer TOKEN")

    def _version_of(self, name: str) -> int | None:
        """Return the weights version that a model's name asks for, None for the newest, or raise HTTPNotFound."""
        version = self._engine.weights_version
        if name not in (MODEL_NAME, f"{MODEL_NAME}@{version}"):
            raise web.HTTPNotFound(
                text=f"model: there is no {name!r} here; ask for {MODEL_NAME} or {MODEL_NAME}@{version}"
            )
        return None if name == MODEL_NAME else version

    # --- answers -------------------------------------------------------------------------------------------------

    async def _healthy(self, _: web.Request) -> web.Response:
        if self._engine.ended is not None:
            return web.Response(status=503, text=f"{self._engine.ended}\n")
        return web.Response(text="ok\n")

    async def _models(self, request: web.Request) -> web.Response:
        card = {
            "id": MODEL_NAME,
            "object": "model",
            "created": 0,
            "owned_by": "rlhfspec",
            "root": self._name,
            "max_model_len": self._engine.limits.max_context,
            "weights_version": self._engine.weights_version,
            "takes_feedback": self._feedback is not None,
        }
        if (name := request.match_info.get("name")) is not None:
            self._version_of(name)
            return web.json_response(card)
        return web.json_response({"object": "list", "data": [card]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = read(ChatBody, await request.read())
        version = self._version_of(body.model)
        messages, arguments = [message.for_template() for message in body.messages], body.template_arguments
        begin = ""
        if body.offers_tools and self._tools is None:
            raise InvalidRequest("tools", f"{len(body.tools or ())} tools", "are not served: start with --tool-parser")
        if body.must_call:
            begin = await self._preparing.in_thread(
                self.conversations.begin_of_call, messages, arguments, body.name_of_tool
            )
        wanted = tuple(body.required_prefix_token_ids or ())
        prompt = await self._preparing.in_thread(
            self.conversations.prompt, messages, arguments, begin=begin, required=wanted
        )
        if prompt.token_ids[: len(wanted)] != wanted:
            raise InvalidRequest(
                "required_prefix_token_ids", f"{len(wanted)} ids", "the messages' ids do not begin with them"
            )
        tools = self._tools if body.offers_tools else None
        asks = [
            replace(ask, given=prompt.given, tools=tools)
            for ask in self._asks(request, body, [prompt.token_ids], self._room(prompt.token_ids), version)
        ]
        return await self._answer(request, body, asks, prompt)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = read(CompletionBody, await request.read())
        version = self._version_of(body.model)
        self._refuse_too_many(len(body.prompts) * (body.n or 1))
        prompts = await self._preparing.in_thread(lambda: [self._encoded(each) for each in body.prompts])
        asks = self._asks(request, body, prompts, _COMPLETION_TOKENS, version)
        return await self._answer(request, body, asks)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = read(GenerateBody, await request.read())
        version = self._version_of(body.model)
        prompt = tuple(body.token_ids)
        [ask] = self._asks(request, body.sampling_params, [prompt], self._room(prompt), version)
        [response] = await self._whole([ask])
        return web.json_response(generated(ask.request.id, response))

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = read(TokenizeBody, await request.read())
        if body.messages is not None:
            messages = [each.for_template() for each in body.messages]
            token_ids = (await self._preparing.in_thread(self.conversations.prompt, messages, {})).token_ids
        elif body.prompt is not None:
            encode = self._tokenizer.encode
            token_ids = tuple(
                await self._preparing.in_thread(encode, body.prompt, add_special_tokens=body.add_special_tokens)
            )
        else:
            raise InvalidRequest("prompt", None, "or messages must be given")
        most = self._engine.limits.max_context
        return web.json_response({"count": len(token_ids), "max_model_len": most, "tokens": token_ids})

    async def _vote(self, request: web.Request) -> web.Response:
        if self._feedback is None:
            raise web.HTTPNotFound(text="feedback is not kept: the server serves no run")
        vote = read(Vote, await request.read())
        await self._preparing.in_thread(self._feedback.vote, vote)
        return web.json_response({"id": vote.id, "vote": vote.vote})

    # --- responses -----------------------------------------------------------------------------------------------

    def _room(self, prompt: Sequence[int]) -> int:
        """Return the most tokens that can follow a prompt; 1 for one that is too long, which the engine refuses."""
        return max(self._engine.limits.max_context - len(prompt), 1)

    def _refuse_too_many(self, num_asked: int) -> None:
        if num_asked > _MOST_OPEN:
            raise InvalidRequest("n", num_asked, f"at most {_MOST_OPEN} responses may be open")
        if self.num_open + num_asked > _MOST_OPEN:
            raise web.HTTPTooManyRequests(
                text=f"{self.num_open} responses are open; come again", headers={"Retry-After": str(_RETRY_SECONDS)}
            )

    def _encoded(self, prompt: str | list[int]) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)

    def _asks(
        self, request: web.Request, body: SamplingBody, prompts: Sequence[tuple[int, ...]], max_tokens: int,
        version: int | None,
    ) -> list[_Ask]:  # fmt: skip
        """Return one checked call of the engine for each choice of each prompt."""
        seed = _drawn(request.headers.get(IDEMPOTENCY_KEY)) if body.seed is None else body.seed
        num_choices, num_top = (body.n or 1, body.num_top or 0) if isinstance(body, AskingBody) else (1, 0)
        params = body.params(max_tokens)
        self._refuse_too_many(len(prompts) * num_choices)

        def ask(index: int, prompt: tuple[int, ...]) -> _Ask:
            own = _seed_of(seed, index, prompt)
            name = secrets.token_hex(12)
            request = Request(
                id=name,
                prompt_token_ids=prompt,
                params=params,
                seed=own,
                top_log_probs=num_top,
                weights_version=version,
            )
            return _Ask(index, seed, request)

        asks = [ask(*each) for each in enumerate(prompt for prompt in prompts for _ in range(num_choices))]
        for each in asks:
            self._engine.validate(each.request)
        return asks

    async def _answer(
        self, request: web.Request, body: AskingBody, asks: list[_Ask], prompt: ChatPrompt | None = None
    ) -> web.StreamResponse:
        kind = "cmpl" if prompt is None else "chatcmpl"
        name = f"{kind}-{secrets.token_hex(12)}"
        shape = Shape(body, name, body.model, self._texts)
        if not body.stream:
            wholes = await self._whole(asks)
            self._remember(name, body, asks, prompt, wholes)
            return web.json_response(shape.whole(wholes))
        stream = KeptStream(request)
        await stream.prepare(request)
        wholes = [ask.response for ask in asks]
        for whole in wholes if prompt is not None else ():
            await _send(stream, shape.first(whole))
        try:
            async with aclosing(self._pieces(asks)) as pieces:
                async for piece in pieces:
                    if piece is None:
                        await stream.write(b": waiting\n\n")
                        continue
                    wholes[piece.index].add(piece)
                    await _send(stream, shape.chunk(piece))
        except RLHFSpecError as error:  # too late for a status
            await _send(stream, problem(str(error), kind="server_error"))
            return stream
        self._remember(name, body, asks, prompt, wholes)
        if body.stream_options is not None and body.stream_options.include_usage:
            await _send(stream, shape.last(wholes))
        await stream.write(STREAM_END)
        return stream

    async def _whole(self, asks: list[_Ask]) -> list[Response]:
        wholes = [ask.response for ask in asks]
        async with aclosing(self._pieces(asks)) as pieces:
            async for piece in pieces:
                if piece is not None:
                    wholes[piece.index].add(piece)
        return wholes

    def _remember(
        self, name: str, body: AskingBody, asks: list[_Ask], prompt: ChatPrompt | None, wholes: list[Response]
    ) -> None:
        if prompt is None or not isinstance(body, ChatBody):
            return
        for each in wholes:
            answer = ChatMessage.model_validate(each.message).for_template()
            is_ended = each.token_ids[-1] in self._engine.limits.eos_token_ids
            self.conversations.answered(prompt, answer, each.token_ids, is_ended=is_ended)
        if self._feedback is not None and len(wholes) == 1:
            messages = [message.for_template() for message in body.messages]
            self._feedback.remember(name, messages, asks[0].request.params, wholes[0])

    async def _pieces(self, asks: list[_Ask]) -> AsyncGenerator[Response | None, None]:
        """Yield what the responses gain, in order of time; None after a silence. Closing it cancels them."""
        queue: asyncio.Queue[Response | asyncio.Task[None]] = asyncio.Queue()

        async def run(ask: _Ask) -> None:
            async with aclosing(self._pieces_of(ask)) as pieces:
                async for piece in pieces:
                    queue.put_nowait(piece)

        self.num_open += len(asks)
        tasks = [asyncio.create_task(run(ask)) for ask in asks]
        for task in tasks:
            task.add_done_callback(queue.put_nowait)
        try:
            num_open = len(asks)
            while num_open:
                try:
                    piece = await asyncio.wait_for(queue.get(), _BEAT_SECONDS)
                except TimeoutError:
                    yield None
                    continue
                if isinstance(piece, asyncio.Task):
                    piece.result()
                    num_open -= 1
                else:
                    yield piece
        finally:
            self.num_open -= len(asks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pieces_of(self, ask: _Ask) -> AsyncGenerator[Response, None]:
        words = Words(self._tokenizer, ask.request.params.stop)
        token_ids = list(ask.given)
        async with aclosing(self._engine.tokens(ask.request)) as pieces:
            async for piece in pieces:
                if piece.finish_reason == "error":
                    raise RLHFSpecError(piece.error)
                token_ids += piece.token_ids
                response = ask.response
                response.token_ids, response.finish_reason = piece.token_ids, piece.finish_reason
                response.log_probs, response.tempered_log_probs = piece.log_probs, piece.tempered_log_probs
                response.top_log_probs = list(piece.top_log_probs)
                response.weights_versions = [piece.weights_version] * len(piece.token_ids)
                is_over = piece.finish_reason is not None
                if ask.tools is None:
                    response.text = words.feed(piece.token_ids) + (words.end() if is_over else "")
                elif is_over:  # a call goes out whole
                    self._read_calls(ask, ask.tools, response, token_ids)
                yield response

    def _read_calls(self, ask: _Ask, tools: ToolCalls, response: Response, token_ids: list[int]) -> None:
        """Divide a whole response into text and calls; a malformed call stays text."""
        found = tools.read(token_ids, f"call-{ask.request.seed:016x}")
        if found is None:
            self.conversations.counts["malformed calls"] += 1
            found = str(self._tokenizer.decode(token_ids, skip_special_tokens=True)), []
        response.text, response.calls = cut_at_stop(found[0], ask.request.params.stop), found[1]
        if response.calls and response.finish_reason == "stop":
            response.finish_reason = "tool_calls"


def client_token() -> str:
    """Return the value of RLHFSPEC_SERVE_TOKEN, or a random token."""
    return os.environ.get(CLIENT_TOKEN_VARIABLE, "").strip() or secrets.token_urlsafe(24)


def variables(host: str, port: int, token: str) -> tuple[str, ...]:
    """Return the settings of the environment with which OpenAI's clients find a server, and the address of its page."""
    base = f"http://{host}:{port}/v1"
    return f"OPENAI_BASE_URL={base}", f"OPENAI_API_KEY={token}", f"chat: {address(host, port, token)}"


@dataclass(frozen=True, slots=True)
class _Ask:
    """Choice of an answer that is still to be generated."""

    index: int
    seed: int  # of the request
    request: Request
    given: tuple[int, ...] = ()  # ids of the prompt that belong to the answer's text
    tools: ToolCalls | None = None

    @property
    def response(self) -> Response:
        """Return a response without tokens."""
        return Response(self.index, self.request.prompt_token_ids, self.seed)


def _drawn(key: str | None) -> int:
    """Return a random seed; the same one for the same idempotency key, so that an answer cut off comes again."""
    if key is None:
        return secrets.randbits(_SEED_BITS)
    return int.from_bytes(hashlib.blake2b(key.encode(errors="surrogateescape")).digest()) % (1 << _SEED_BITS)


def _seed_of(seed: int, index: int, prompt: Sequence[int]) -> int:
    """Return the engine's seed: noise must not repeat between the choices of a request or the turns of a chat."""
    said = repr((seed, index, tuple(prompt))).encode()
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little")


async def _send(stream: web.StreamResponse, data: Any) -> None:
    await stream.write(f"data: {json.dumps(data)}\n\n".encode())


def _refused(status: int, message: str, *, headers: dict[str, str] | None = None, **more: Any) -> web.Response:
    return web.json_response(problem(message, **more), status=status, headers=headers)


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name in _KEPT}

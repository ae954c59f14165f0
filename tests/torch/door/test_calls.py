"""Calls of a gateway into generators over TLS, with real engines, which are killed, leave, and forget."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from askers import asking
from chats import TOKEN, chat_engine, chat_tokenizer
from coroutines import until
from small_job import a_job
from stages import Stages, ends

from rlhfspec.door import control as control_module, generators as generators_module
from rlhfspec.door.calls import EngineThread, Gained
from rlhfspec.door.control import Call, CallServer, More, Release, to_question
from rlhfspec.door.generators import GeneratorCalls, NoGenerator
from rlhfspec.door.server import PolicyDoor
from rlhfspec.engine import Completion, Engine, Request, SamplingParams
from rlhfspec.errors import InvalidRequest, RLHFSpecError, WeightsVersionError
from rlhfspec.messages.records import Load, WorkerInfo
from rlhfspec.messages.servers.credentials.certificates import create_credentials, server_tls
from rlhfspec.moves.migration import messages
from rlhfspec.moves.migration.base import NoReply, Peer
from rlhfspec.moves.migration.control import StreamControlServer
from rlhfspec.tiny import random_model
from rlhfspec.tiny.tokenizer import VOCAB_SIZE
from rlhfspec.worker.ends import CALLER, MOVERS, calling

PROMPT = tuple(range(40, 60))
LONG = 120  # tokens of a response
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("credentials")
    create_credentials(folder, ["generator", "gateway", "reward"])
    return folder


def asked(seed: int = 7, prompt: tuple[int, ...] = PROMPT, **params: Any) -> Request:
    chosen = SamplingParams(**{"max_tokens": LONG, "ignore_eos": True} | params)
    return Request(id=f"call-{next(NUMBERS)}", prompt_token_ids=prompt, params=chosen, seed=seed, top_log_probs=2)


def alone(request: Request) -> Completion:
    """Return the answer of an engine that nothing disturbs."""
    [done] = chat_engine().generate([list(request.prompt_token_ids)], request.params, seeds=[request.seed])
    return done


def same(gains: list[Gained], done: Completion) -> bool:
    found = [
        tuple(each for gained in gains for each in getattr(gained, name))
        for name in ("token_ids", "log_probs", "tempered_log_probs")
    ]
    assert found == [done.token_ids, done.log_probs, done.tempered_log_probs]
    assert sum(len(gained.top_log_probs) for gained in gains) == len(done.token_ids)
    return [gained.finish_reason for gained in gains if gained.finish_reason] == [done.finish_reason]


def slow_down(engine: Engine, pace: float) -> None:
    step, waiting = engine.step, Event()

    def slow() -> Any:
        waiting.wait(pace)
        return step()

    engine.step = slow  # type: ignore[method-assign]


class CalledEngine:
    """Engine that a gateway calls, as in a generator's process. `pace`: seconds of a step."""

    def __init__(self, credentials: Path, *, pace: float = 0.0, **options: Any) -> None:
        self.engine = chat_engine(**options)
        slow_down(self.engine, pace)
        self.thread = EngineThread(self.engine, most_kept=8)
        self.server = StreamControlServer(tls=server_tls(credentials, "generator"), askers=(*MOVERS, CALLER))
        self.server.serve(CallServer(self.thread.calls).answer, role=CALLER)

    def info(self, worker: int) -> WorkerInfo:
        return WorkerInfo(
            id=f"generator/{worker}/{next(NUMBERS)}", job="sums", stage="generator", worker=worker, host="here", pid=1,
            grpc_address="", http_address="", moves_address=self.server.address,
        )  # fmt: skip

    @property
    def peer(self) -> Peer:
        return Peer(name="generator-0", address=self.server.address, incarnation="d")

    @property
    def num_running(self) -> int:
        return self.engine.stats().num_running

    def kill(self) -> None:
        self.server.close()
        self.thread.close()


class GatewayWorld:
    def __init__(self, credentials: Path) -> None:
        self.credentials = credentials
        self.control = calling(credentials, None)
        self.calls = GeneratorCalls(self.control)
        self.engines: list[CalledEngine] = []

    async def start(self, worker: int, **options: Any) -> CalledEngine:
        called = CalledEngine(self.credentials, **options)
        self.engines.append(called)
        self.calls.meet(called.info(worker))
        await until(lambda: self.calls._generators[worker].takes_calls)
        return called

    async def ask(self, request: Request) -> list[Gained]:
        return [gained async for gained in self.calls.tokens(request)]


class ReadStream:
    """Call that is read token by token."""

    def __init__(self, made: GatewayWorld, request: Request) -> None:
        self.gains: list[Gained] = []
        self.reading = asyncio.create_task(self._read(made.calls.tokens(request)))

    async def _read(self, stream: AsyncGenerator[Gained, None]) -> None:
        async with aclosing(stream):
            async for gained in stream:
                self.gains.append(gained)

    async def all(self) -> list[Gained]:
        await self.reading
        return self.gains


@asynccontextmanager
async def begun(made: GatewayWorld, request: Request) -> AsyncIterator[ReadStream]:
    stream = ReadStream(made, request)
    await until(lambda: stream.gains)
    try:
        yield stream
    finally:
        stream.reading.cancel()


@asynccontextmanager
async def world(credentials: Path) -> AsyncIterator[GatewayWorld]:
    made = GatewayWorld(credentials)
    try:
        yield made
    finally:
        made.calls.close()
        made.control.close()
        for each in made.engines:
            each.kill()


# ---- a response that begins elsewhere -------------------------------------------------------------------------------


@pytest.mark.parametrize("speculation", ["off", "suffix"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.5, "top_p": 0.9}, {"stop": ("e", "a"), "ignore_eos": False}])
def test_a_response_that_began_elsewhere_goes_on_with_the_same_bits(speculation: str, params: dict[str, Any]) -> None:
    request = asked(max_tokens=24, **params)
    done = alone(request)
    engine = chat_engine(speculation=speculation)
    for start in range(len(done.token_ids)):
        engine.submit(replace(request, id=f"from {start}"), done.token_ids[:start])
    gains: dict[str, Any] = {}
    while engine.has_work:
        for gain in engine.step().gains:
            gains.setdefault(gain.id, []).append(gain)
    for start in range(len(done.token_ids)):
        mine = gains[f"from {start}"]
        for name in ("token_ids", "log_probs", "tempered_log_probs"):
            found = tuple(each for gain in mine for each in getattr(gain, name).tolist())
            assert found == getattr(done, name)[start:]
        assert mine[-1].finish_reason == done.finish_reason
    engine.check_integrity()


@pytest.mark.parametrize("response", [(1,) * LONG, (1, 1 << 20), (-1,)])
def test_a_response_that_cannot_go_on_is_refused(response: tuple[int, ...]) -> None:
    engine = chat_engine()
    with pytest.raises(InvalidRequest, match="response"):
        engine.submit(asked(), response)
    assert not engine.has_work


# ---- over the connection --------------------------------------------------------------------------------------------


async def test_only_the_gateway_may_call_and_it_may_not_move(credentials: Path) -> None:
    called = CalledEngine(credentials)

    async def taken(data: bytes) -> bytes:
        return messages.to_bytes(messages.Gone(**messages.told(data).head(), here="e"))

    called.server.serve(taken, role="generator")
    move = messages.to_bytes(messages.Ask(move="m", sample="x", number=1, source="s", destination="d"))
    call = to_question(Call(request=asked()))
    try:
        with asking(credentials, "gateway") as control:
            assert await control.ask(called.peer, call) == b""
            for wrong in (move, b"", b'["Call", {}]', call[:-2]):
                with pytest.raises(NoReply, match="not a message about calls"):
                    await control.ask(called.peer, wrong)
        with asking(credentials, "generator") as control:
            assert isinstance(messages.reply(await control.ask(called.peer, move)), messages.Gone)
            with pytest.raises(NoReply, match="malformed"):
                await control.ask(called.peer, call)
        with asking(credentials, "reward") as control, pytest.raises(NoReply, match="reward may not"):
            await control.ask(called.peer, call)
    finally:
        called.kill()


async def test_calls_have_the_tokens_and_log_probs_of_the_engine(credentials: Path) -> None:
    async with world(credentials) as made:
        await made.start(0)
        await made.start(1)
        requests = [asked(seed, temperature=1.0 - seed / 10) for seed in range(6)]
        for request, gains in zip(requests, await asyncio.gather(*map(made.ask, requests)), strict=True):
            assert same(gains, alone(request))
        assert all(each.engine.stats().num_generated_tokens >= LONG for each in made.engines), "both had calls"
        assert made.calls.limits.max_context == 256
        with pytest.raises(InvalidRequest, match="prompt_token_ids"):
            made.calls.validate(asked(prompt=(1 << 20,)))


async def test_many_calls_at_once_are_all_answered(credentials: Path) -> None:
    """They are more than a server answers at a time."""
    async with world(credentials) as made:
        await made.start(0)
        found = await asyncio.gather(*(made.ask(asked(seed, max_tokens=2)) for seed in range(150)))
        assert all(sum(len(gained.token_ids) for gained in gains) == 2 for gains in found)
        await until(lambda: not made.engines[0].engine.has_work)


async def test_a_conversation_goes_on_where_its_kv_is(credentials: Path) -> None:
    async with world(credentials) as made:
        engines = [(await made.start(worker, pace=0.005)).engine for worker in range(2)]
        async with begun(made, asked()):  # at worker 0
            first = await made.ask(asked(3, max_tokens=8))
            told = (*PROMPT, *(token for gained in first for token in gained.token_ids))
        for _ in range(2):
            await made.ask(asked(9, prompt=tuple(range(5)), max_tokens=4))  # others come between
        before = engines[1].stats()
        longer = asked(4, prompt=(*told, 50, 51), max_tokens=8)
        assert same(await made.ask(longer), alone(longer))
        after = engines[1].stats()
        assert after.num_generated_tokens - before.num_generated_tokens == 8
        assert after.num_prefill_tokens - before.num_prefill_tokens <= 4, "all else was there"


# ---- generators that end --------------------------------------------------------------------------------------------


async def test_streams_of_a_killed_generator_go_on_at_another_without_a_token_lost_or_doubled(
    credentials: Path,
) -> None:
    async with world(credentials) as made:
        first = await made.start(0, pace=0.005)
        requests = [asked(seed) for seed in range(3)]
        streams = [ReadStream(made, request) for request in requests]
        await until(lambda: all(stream.gains for stream in streams))
        await made.start(1, pace=0.005)
        first.kill()
        for request, stream in zip(requests, streams, strict=True):
            assert same(await stream.all(), alone(request))
        assert 0 < made.engines[1].engine.stats().num_generated_tokens < 3 * LONG, "the rest"


async def test_streams_wait_for_a_restart_and_new_requests_do_not(credentials: Path) -> None:
    async with world(credentials) as made:
        first = await made.start(0, pace=0.005)
        request = asked()
        async with begun(made, request) as stream:
            first.kill()
            await until(lambda: not made.calls._generators[0].takes_calls)
            with pytest.raises(NoGenerator):
                made.calls.validate(asked())
            await made.start(0)
            assert same(await stream.all(), alone(request))
            made.calls.validate(asked())


async def test_a_stream_ends_with_an_error_when_no_generator_comes_back(
    credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generators_module, "PATIENCE_SECONDS", 0.2)
    async with world(credentials) as made:
        first = await made.start(0, pace=0.005)
        async with begun(made, asked()) as stream:
            first.kill()
            with pytest.raises(NoGenerator):
                await stream.all()


async def test_streams_of_a_generator_that_leaves_go_on_at_another(credentials: Path) -> None:
    """It answers all the time, and takes no call."""
    async with world(credentials) as made:
        first = await made.start(0, pace=0.005)
        request = asked()
        async with begun(made, request) as stream:
            await made.start(1)
            first.thread.close()
            assert same(await stream.all(), alone(request))
        request = asked(3)
        assert same(await made.ask(request), alone(request))


async def test_a_call_that_nobody_asks_for_ends(credentials: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a gateway that was killed."""
    monkeypatch.setattr(control_module, "FORGOTTEN_SECONDS", 0.05)
    called = CalledEngine(credentials, pace=0.02, max_context=500)
    try:
        with asking(credentials, "gateway") as control:
            await control.ask(called.peer, to_question(Call(request=asked(max_tokens=400))))
            await until(lambda: called.num_running == 1)
            await asyncio.sleep(0.1)
            await control.ask(called.peer, to_question(Release(ids=[])))
            await until(lambda: not called.engine.has_work)
            assert called.engine.stats().num_generated_tokens < 400, "it was ended"
            more = to_question(More(seen={"x": 0}, weights_version=0))
            assert control_module.read_news(await control.ask(called.peer, more)).lost == ["x"]
    finally:
        called.kill()


async def test_a_client_that_leaves_frees_its_row(credentials: Path) -> None:
    async with world(credentials) as made:
        called = await made.start(0, pace=0.02, max_context=500)
        async with begun(made, asked(max_tokens=400)):
            assert called.num_running == 1
        await until(lambda: not called.engine.has_work)
        assert called.engine.stats().num_generated_tokens < 400, "it was ended"
        called.engine.check_integrity()


async def test_a_request_that_ends_one_generator_after_the_other_is_given_up(
    credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(self: Any, request: Request, response: Any) -> AsyncGenerator[Gained, None]:
        raise generators_module.CallLost(request.id)
        yield

    async with world(credentials) as made:
        await made.start(0)
        monkeypatch.setattr(generators_module._CalledGenerator, "tokens", lost)
        with pytest.raises(RLHFSpecError, match="3 generators failed at this request"):
            await made.ask(asked())


async def test_a_version_is_served_by_a_generator_that_has_it_or_refused(credentials: Path) -> None:
    async with world(credentials) as made:
        old, new = await made.start(0), await made.start(1)
        weights = random_model("llama", seed=1, vocab_size=VOCAB_SIZE).state_dict()
        new.engine.load_weights(dict(weights), version=1)
        await until(lambda: made.calls.weights_version == 1)
        gains = await made.ask(replace(asked(), weights_version=1))
        assert {gained.weights_version for gained in gains} == {1}
        assert {gained.weights_version for gained in await made.ask(asked())} == {1}, "the newest goes first"
        assert old.engine.stats().num_steps == 0
        with pytest.raises(WeightsVersionError):
            made.calls.validate(replace(asked(), weights_version=0))


async def test_the_door_answers_503_without_generators(credentials: Path) -> None:
    async with world(credentials) as made:
        called = await made.start(0)
        door = PolicyDoor(made.calls, chat_tokenizer(), name="tiny", token=TOKEN)
        async with TestClient(TestServer(door.app())) as client:
            body = {"model": "policy", "prompt": "2+2=", "max_tokens": 3, "stream": True}
            headers = {"Authorization": f"Bearer {TOKEN}"}
            assert (await client.post("/v1/completions", json=body, headers=headers)).status == 200
            assert (await client.get("/healthz")).status == 200
            called.kill()
            await until(lambda: not made.calls._generators[0].takes_calls)
            assert (await client.get("/healthz")).status == 503
            refused = await client.post("/v1/completions", json=body, headers=headers)
            assert refused.status == 503
            assert "no generator answers" in (await refused.json())["error"]["message"]


# ---- beside samples -------------------------------------------------------------------------------------------------


async def test_the_rebalancer_sees_no_sequence_of_a_client() -> None:
    """So it moves none."""
    stages = await Stages.open(a_job(roles={"generator": {"workers": 2}}), generator=2, rebalancer=1)
    loads = await stages.bus.of("rebalancer").subscribe(Load)
    engine = chat_engine()
    slow_down(engine, 0.02)
    service = stages.generator(0, engine)
    calls = service.for_clients()
    task = asyncio.create_task(service.run())
    request = asked(max_tokens=40)
    assert same([gained async for gained in calls.tokens(request)], alone(request))
    told = [delivery.record for delivery in await loads.pull(max_records=100, timeout_seconds=0.0)]
    assert any(load.num_running for load in told)
    assert all(load.sample_ids == () for load in told)
    await ends(task, service)

"""Calls of clients into the generators of a run, which go on elsewhere when a generator fails."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from itertools import count

from rlhfspec.door.calls import MOST_CONVERSATIONS, CallLimits, Gained, begins
from rlhfspec.door.control import MORE_SECONDS, Call, More, News, Question, Release, read_news, to_question
from rlhfspec.engine.base import Request
from rlhfspec.engine.requests import check_request
from rlhfspec.errors import MalformedRecord, RLHFSpecError, WeightsVersionError
from rlhfspec.messages.records import WorkerInfo
from rlhfspec.moves.migration.base import TELL_SECONDS, MoveControl, NoReply, Peer

PATIENCE_SECONDS = 120.0  # of a call that has begun, while no generator answers
_BEHIND_SECONDS = 10.0  # wait for a generator with the newest weights, before an older one takes a call
_MOST_LOSSES = 3  # of a call, one after another, before it counts as the generators' end
_AGAIN_SECONDS = 0.1  # between two questions to a generator that does not answer
_MOST_ASKED = 16  # questions to a generator at a time
_NEVER = -1  # its weights version while a generator does not answer


class NoGenerator(RLHFSpecError):
    def __init__(self) -> None:
        super().__init__("no generator answers; ask again later")


class CallLost(RLHFSpecError):
    """Raised when a generator ends or forgets a call, which another one can continue."""


class _CalledGenerator:
    """Generator as its gateway knows it: its state, its calls, and the conversations that it keeps."""

    def __init__(self, peer: Peer, control: MoveControl, on_news: Callable[[News], None]) -> None:
        self.peer = peer
        self.weights_version = _NEVER
        self.takes_calls = False
        self.num_calls = 0
        self.kept: deque[tuple[int, ...]] = deque(maxlen=MOST_CONVERSATIONS)  # tokens of finished calls
        self._control = control
        self._on_news = on_news
        self._queues: dict[str, asyncio.Queue[Gained | None]] = {}  # of running calls; None: it is lost
        self._num_seen: dict[str, int] = {}  # gains of each
        self._changed = asyncio.Event()  # since the last question
        self._asking = asyncio.Semaphore(_MOST_ASKED)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._begin(self._listen())

    def close(self) -> None:
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        self._lose(list(self._queues))

    async def tokens(self, request: Request, response: Sequence[int]) -> AsyncGenerator[Gained, None]:
        """Yield a request's gains after `response`. Raise CallLost if another generator has to go on."""
        queue: asyncio.Queue[Gained | None] = asyncio.Queue()
        self.num_calls += 1
        try:
            await self._ask(Call(request=request, response=tuple(response)))
            if self._is_closed:  # meanwhile
                raise CallLost(request.id)
            self._queues[request.id], self._num_seen[request.id] = queue, 0
            self._changed.set()
            while (gained := await queue.get()) is not None:
                yield gained
                if gained.finish_reason is not None:
                    return
            raise CallLost(request.id)
        except NoReply as error:
            self.takes_calls = False  # until its next news
            raise CallLost(str(error)) from None
        finally:
            self.num_calls -= 1
            self._forget(request.id)
            self._begin(self._release(request.id))

    async def _listen(self) -> None:
        while True:
            self._changed.clear()
            more = More(seen=dict(self._num_seen), weights_version=self.weights_version)
            asking = asyncio.create_task(self._ask(more, timeout=MORE_SECONDS + TELL_SECONDS))
            changing = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait([asking, changing], return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    self._take(read_news(asking.result()))
            except (NoReply, MalformedRecord):
                self.takes_calls, self.weights_version = False, _NEVER
                self.kept.clear()
                self._lose(list(self._queues))
                await asyncio.sleep(_AGAIN_SECONDS)
            finally:
                asking.cancel()
                changing.cancel()

    def _take(self, news: News) -> None:
        self.weights_version, self.takes_calls = news.weights_version, news.takes_calls
        for name, gains in news.gains.items():
            for gained in gains if name in self._queues else ():
                self._num_seen[name] += 1
                self._queues[name].put_nowait(gained)
            if gains[-1].finish_reason is not None:
                self._forget(name)
        self._lose(news.lost)
        self._on_news(news)

    def _lose(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._queues:
                self._queues[name].put_nowait(None)
                self._forget(name)

    def _forget(self, name: str) -> None:
        self._queues.pop(name, None)
        self._num_seen.pop(name, None)

    async def _ask(self, question: Question, *, timeout: float = TELL_SECONDS) -> bytes:
        async with self._asking:
            return await self._control.ask(self.peer, to_question(question), timeout=timeout)

    async def _release(self, name: str) -> None:
        with suppress(NoReply):  # then it ends by itself
            await self._ask(Release(ids=[name]))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class GeneratorCalls:
    """Calls of clients into a run's generators.

    A call goes to the generator that keeps the longest beginning of its prompt, else to the one with the fewest calls.
    When that one fails, another samples the tokens that are missing, which are the same for the same weights.
    """

    def __init__(self, control: MoveControl) -> None:
        self._control = control
        self._generators: dict[int, _CalledGenerator] = {}
        self._limits: CallLimits | None = None
        self._news = asyncio.Event()
        self.weights_version = 0

    def meet(self, info: WorkerInfo) -> None:
        """Note a generator that has started."""
        known = self._generators.get(info.worker)
        if info.stage != "generator" or (known is not None and known.peer.incarnation == info.id):
            return
        if known is not None:
            known.close()
        peer = Peer(name=f"generator-{info.worker}", address=info.moves_address, incarnation=info.id)
        self._generators[info.worker] = _CalledGenerator(peer, self._control, self._hear)

    def close(self) -> None:
        for generator in self._generators.values():
            generator.close()

    async def until_ready(self) -> None:
        """Wait for the first reply of a generator, which tells the limits."""
        while self._limits is None:
            await self._next_news()

    @property
    def ended(self) -> RLHFSpecError | None:
        return None if self._answering(_NEVER) else NoGenerator()

    @property
    def limits(self) -> CallLimits:
        assert self._limits is not None, "wait for until_ready()"
        return self._limits

    def validate(self, request: Request) -> None:
        """Raise InvalidRequest, naming the field, or NoGenerator."""
        check_request(
            request, num_token_ids=self.limits.num_token_ids, most_tokens=self.limits.most_tokens, has_tokenizer=True,
            weights_version=self.weights_version,
        )  # fmt: skip
        if self.ended is not None:
            raise self.ended

    async def tokens(self, request: Request) -> AsyncGenerator[Gained, None]:
        response: list[int] = []
        num_lost = 0
        for attempt in count():
            generator = await self._chosen(request, response)
            called = replace(request, id=f"{request.id}.{attempt}")
            try:
                async with aclosing(generator.tokens(called, response)) as gains:
                    async for gained in gains:
                        num_lost = 0
                        response += gained.token_ids
                        if gained.finish_reason not in (None, "error"):
                            generator.kept.append((*request.prompt_token_ids, *response))
                        yield gained
                        if gained.finish_reason is not None:
                            return
            except CallLost:
                num_lost += 1
                if num_lost == _MOST_LOSSES:
                    raise RLHFSpecError(f"{num_lost} generators failed at this request, one after another") from None

    async def _chosen(self, request: Request, response: Sequence[int]) -> _CalledGenerator:
        """Return the generator for a call, if possible with the newest weights."""
        pinned = request.weights_version
        with suppress(TimeoutError):
            async with asyncio.timeout(_BEHIND_SECONDS):
                while not (answering := self._answering(self.weights_version if pinned is None else pinned)):
                    await self._next_news()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not answering and not (answering := self._answering(_NEVER)):
                    await self._next_news()
        except TimeoutError:
            raise NoGenerator from None
        if pinned is not None and not (answering := [one for one in answering if one.weights_version == pinned]):
            raise WeightsVersionError(pinned, self.weights_version, "not the loaded one")
        prompt = () if response else request.prompt_token_ids
        kept = [(one, token_ids) for one in answering for token_ids in one.kept if begins(prompt, token_ids)]
        if not kept:
            return min(answering, key=lambda one: one.num_calls)
        generator, longest = max(kept, key=lambda each: len(each[1]))
        generator.kept.remove(longest)  # it goes on
        return generator

    def _answering(self, version: int) -> list[_CalledGenerator]:
        """Return the generators that take calls, with weights no older than `version`."""
        there = (each for _, each in sorted(self._generators.items()))
        return [each for each in there if each.takes_calls and each.weights_version >= version]

    def _hear(self, news: News) -> None:
        self._limits = news.limits
        self.weights_version = max(self.weights_version, news.weights_version)
        self._news.set()

    async def _next_news(self) -> None:
        self._news.clear()
        await self._news.wait()

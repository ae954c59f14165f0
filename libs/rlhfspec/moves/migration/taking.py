"""Destination side of moves: executes the decisions of `Destination`, its state machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from rlhfspec.engine.base import KVRange, Manifest, MovableByTokens, SequenceState, Watermark
from rlhfspec.engine.kv.state_bytes import from_bytes, to_bytes
from rlhfspec.engine.scheduling.sequences import stats_of
from rlhfspec.errors import InvalidRequest, LinkError, MalformedRecord, RLHFSpecError, SequenceStateError
from rlhfspec.messages.transport.clock import Clock
from rlhfspec.moves.migration import messages
from rlhfspec.moves.migration.base import Custody
from rlhfspec.moves.migration.destination import Destination, Judgement
from rlhfspec.moves.migration.engine_calls import EngineCalls
from rlhfspec.moves.migration.links.opening import Links
from rlhfspec.telemetry.base import SampleProgress

LINK_SECONDS = 4.0  # for an announced range to arrive
_TICK_SECONDS = 1.0
_MAX_RANGE_BYTES = 1 << 30  # of one range; more is malformed


class Taking:
    def __init__(
        self,
        incarnation: str,
        engine: MovableByTokens,
        calls: EngineCalls,
        links: Links,
        custody: Custody,
        clock: Clock,
    ) -> None:
        self.machine = Destination(incarnation, links.landing.offer)
        self._engine = engine
        self._kv = engine.abilities.moves_kv
        self._calls = calls
        self._links = links
        self._custody = custody
        self._clock = clock
        self._lines: dict[str, tuple[asyncio.Lock, int]] = {}  # by sample, with the number of waiting messages
        self._freeing: dict[str, asyncio.Future[bool]] = {}
        self._waits: dict[str, tuple[messages.MoveMessage, asyncio.Event]] = {}  # waits for the link
        self._ticking: asyncio.Task[None] | None = None

    @property
    def arriving(self) -> frozenset[str]:
        """Return the samples for which the engine holds memory: arriving, or being freed."""
        return self.machine.arriving | self._freeing.keys()

    async def answer(self, data: bytes) -> bytes:
        message = messages.told(data)
        self._ticking = self._ticking or asyncio.create_task(self._tick())
        self._part(message)
        async with self._in_line(message.sample):
            freed, reply = self.machine.arrived(message, self._clock.now())
            freeing = self._free(freed)
            if reply is None:
                freed, reply = await self._do(message)
                assert reply is not None, "what was carried out is answered"
                freeing = asyncio.gather(freeing, self._free(freed))
            await freeing
            return messages.to_bytes(reply)

    async def refuse(self) -> None:
        await self._free(self.machine.close())

    async def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        await self.refuse()

    async def _do(self, message: messages.Told) -> Judgement:
        mark, num_recomputed, refusal = b"", 0, None
        try:
            match message:
                case messages.Reserve():
                    mark = await self._keep(message)
                case messages.Range():
                    await self._copy(message)
                case messages.HandOver():
                    num_recomputed = await self._take(message)
        except (SequenceStateError, InvalidRequest) as error:
            refusal = (error.field, str(error)[:500])
        except LinkError as error:
            refusal = ("link", str(error)[:500])
        except MalformedRecord as error:
            refusal = ("bytes", str(error)[:500])
        except RLHFSpecError as error:
            refusal = (type(error).__name__, str(error)[:500])
        now = self._clock.now()
        return self.machine.done(message, now, refusal, mark=mark, num_recomputed=num_recomputed)

    async def _keep(self, message: messages.Reserve) -> bytes:
        manifest = from_bytes(message.manifest)
        if not isinstance(manifest, Manifest) or manifest.request.id != message.sample:
            raise MalformedRecord("no manifest of this sample")

        def reserve() -> bytes:
            if message.has_kv:
                if self._kv is None:
                    raise SequenceStateError("kv", "KV", "an engine that takes tokens only")
                return to_bytes(self._kv.reserve(manifest))
            ours = self._engine.weights_version
            if manifest.weights_version > ours:
                raise SequenceStateError("newer weights", manifest.weights_version, ours)
            return b""

        return await self._calls.call(reserve)

    async def _copy(self, message: messages.Range) -> None:
        view = await self._arrived(message)
        try:
            kv, engine = _range(message.kv, view, message.sample), self._kv
            if engine is None:
                raise SequenceStateError("kv", "KV", "an engine that takes tokens only")
            await self._calls.call(lambda: engine.import_range(kv))
        finally:
            self._links.landing.done(message.key)

    async def _take(self, message: messages.HandOver) -> int:
        state = from_bytes(message.state)
        if not isinstance(state, SequenceState) or state.manifest.request.id != message.sample:
            raise MalformedRecord("no state of this sample")
        if self._custody.prompt_of(message.sample) is not None:
            raise InvalidRequest("sample", message.sample, "is here already")
        if not message.key:
            return await self._adopt(message, state)
        view = await self._arrived(message)
        try:
            return await self._adopt(message, replace(state, rest=_range(message.kv, view, message.sample)))
        finally:
            self._links.landing.done(message.key)

    async def _adopt(self, message: messages.HandOver, state: SequenceState) -> int:
        """Store the prompt, import its sequence, and return the number of tokens to recompute."""
        await self._custody.taken(message.sample, message.prompt, message.token)

        def take() -> int:
            before = self._engine.stats().num_recomputed_tokens
            self._engine.import_sequence(state)
            return self._engine.stats().num_recomputed_tokens - before

        try:
            num_recomputed = await self._calls.call(take)
        except RLHFSpecError:
            self._custody.given(message.sample, None)
            raise
        self._custody.arrived(message.sample, progress_of(state))
        return num_recomputed

    async def _arrived(self, message: messages.Range | messages.HandOver) -> memoryview:
        key, num_bytes, landing = message.key, message.num_bytes, self._links.landing
        if num_bytes > _MAX_RANGE_BYTES:
            raise MalformedRecord(f"a range of {num_bytes} bytes")
        if landing.has(key):
            return landing.take(key, num_bytes, timeout=0.0)  # the usual case: sent before announced
        given_up = asyncio.Event()
        self._waits[message.sample] = (message, given_up)
        watching = asyncio.create_task(given_up.wait())
        taking = asyncio.ensure_future(
            self._links.in_thread(lambda: landing.take(key, num_bytes, timeout=LINK_SECONDS))
        )
        try:
            await asyncio.wait([taking, watching], return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            del self._waits[message.sample]
        if not taking.done():

            def drop(taken: asyncio.Future[memoryview]) -> None:
                if not taken.cancelled() and taken.exception() is None:
                    landing.done(key)

            taking.add_done_callback(drop)
            raise LinkError(key, "its source gave it up")
        return taking.result()

    def _part(self, message: messages.Told) -> None:
        waiting, given_up = self._waits.get(message.sample, (None, None))
        if waiting is None or given_up is None or waiting.source != message.source:
            return
        is_next = isinstance(message, messages.Reserve) and message.number > waiting.number
        if is_next or (isinstance(message, messages.Abort) and message.number == waiting.number):
            given_up.set()

    def _free(self, samples: list[str]) -> asyncio.Future[list[Any]]:
        """Queue cancels of the samples in the engine, before any later call; return their future."""
        freed = {sample: self._calls.call(partial(self._engine.cancel, sample)) for sample in samples}
        self._freeing |= freed
        for sample in samples:
            freed[sample].add_done_callback(partial(self._freed, sample))
        return asyncio.gather(*freed.values(), return_exceptions=True)  # a stopped engine keeps nothing

    def _freed(self, sample: str, call: asyncio.Future[bool]) -> None:
        if self._freeing.get(sample) is call:
            del self._freeing[sample]

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(_TICK_SECONDS)
            await self._free(self.machine.expire(self._clock.now()))

    @asynccontextmanager
    async def _in_line(self, sample: str) -> AsyncIterator[None]:
        lock, count = self._lines.get(sample, (asyncio.Lock(), 0))
        self._lines[sample] = (lock, count + 1)
        try:
            async with lock:
                yield
        finally:
            count = self._lines[sample][1] - 1
            if count:
                self._lines[sample] = (lock, count)
            else:
                del self._lines[sample]


def _range(said: bytes, kv: memoryview, sample: str) -> KVRange:
    read = from_bytes(said, kv=kv)
    if not isinstance(read, KVRange) or read.request_id != sample:
        raise MalformedRecord("no KV of this sample")
    return read


def watermark(said: bytes) -> Watermark:
    read = from_bytes(said)
    if not isinstance(read, Watermark):
        raise MalformedRecord("no watermark")
    return read


def progress_of(state: SequenceState) -> SampleProgress:
    """Return a moving sequence's progress, stamped with the present time."""
    stats = stats_of(state.counters, state.strategies)
    return SampleProgress(
        num_moves=stats.num_moves,
        weights_versions=tuple(state.weights_versions.tolist()),
        num_verifications=stats.num_verifications,
        num_drafted=stats.num_drafted,
        num_accepted=stats.num_accepted,
        strategies=stats.strategies,
        at=time.time(),
    )

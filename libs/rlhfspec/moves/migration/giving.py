"""Source side of a move: runs its state machine, and chooses between KV and tokens by cost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from rlhfspec.engine.base import MOST_RANGE_BYTES, KVRange, Manifest, MovableByTokens, SequenceState, Watermark
from rlhfspec.engine.kv.state_bytes import to_bytes
from rlhfspec.errors import InvalidRequest, LinkError, MalformedRecord, RLHFSpecError, SequenceStateError
from rlhfspec.messages.records import Move, Moved
from rlhfspec.messages.transport.clock import Clock
from rlhfspec.moves.migration import messages, source as machines
from rlhfspec.moves.migration.base import TELL_SECONDS, Custody, MoveControl, NoReply, Peer
from rlhfspec.moves.migration.engine_calls import EngineCalls
from rlhfspec.moves.migration.links.opening import Links, SendingWay
from rlhfspec.moves.migration.source import Action, Detached, Event, Failed, Heard, MoveSource, PackedKV, Silence
from rlhfspec.moves.migration.taking import progress_of, watermark
from rlhfspec.telemetry.base import SampleProgress

_ASK_SECONDS = 2.0  # for an answer that needs no engine
_HURRIED_SECONDS = 1.5  # for the first answer when leaving: another peer may be quicker
_NO_KV = 1 << 30  # a position behind every KV position
LEAST_BYTES = 1 << 18  # smaller ranges say nothing about bandwidth
_NEWEST_WEIGHT = 0.3  # weight of the newest measurement
_LOOK_SECONDS = 0.01  # between two looks for the next chunk of a prompt
_CHUNK_SECONDS = 5.0  # for the next chunk, well within the destination's lease


@dataclass(frozen=True, slots=True)
class MoveChoice:
    how: Literal["kv", "tokens", "stay"]
    reason: str


class Costs:
    """Measured costs of moves from one generator: the link to each peer, and prefill of tokens.

    >>> costs = Costs()
    >>> costs.choose("b", 1000, gain_seconds=1.0)
    MoveChoice(how='kv', reason='not measured yet')
    >>> costs.learn_prefill(1000, 0.5); costs.learn_size(1000, 4_000_000)
    >>> costs.learn_link("b", num_bytes=4_000_000, seconds=0.004)
    >>> costs.choose("b", 1000, gain_seconds=1.0)
    MoveChoice(how='kv', reason='4.0 MB in 4 ms, 1000 tokens recomputed in 500 ms')
    >>> costs.learn_link("b", num_bytes=400_000, seconds=1.0)
    >>> [costs.choose("b", 1000, gain_seconds=gain).how for gain in (9.0, 0.1)]
    ['tokens', 'stay']
    """

    def __init__(self) -> None:
        self._seconds_a_byte: dict[str, float] = {}
        self._prefill_seconds: float | None = None  # a token
        self.bytes_a_token: float | None = None

    def learn_link(self, peer: str, *, num_bytes: int, seconds: float) -> None:
        """Learn a peer's seconds per byte, from packing to import, ignoring small ranges."""
        if num_bytes >= LEAST_BYTES:
            known = self._seconds_a_byte.get(peer)
            self._seconds_a_byte[peer] = _newer(known, seconds / num_bytes)

    def learn_prefill(self, num_tokens: int, seconds: float) -> None:
        if num_tokens:
            self._prefill_seconds = _newer(self._prefill_seconds, seconds / num_tokens)

    def learn_size(self, num_tokens: int, num_bytes: int) -> None:
        if num_tokens and num_bytes:
            self.bytes_a_token = num_bytes / num_tokens

    def choose(self, peer: str, num_tokens: int, *, gain_seconds: float, must_go: bool = False) -> MoveChoice:
        """Choose between KV, tokens and staying (unless `must_go`) by seconds."""
        speed, size, prefill = self._seconds_a_byte.get(peer), self.bytes_a_token, self._prefill_seconds
        if speed is None or size is None or prefill is None:
            return MoveChoice("kv", "not measured yet")
        num_bytes = num_tokens * size
        send, again = num_bytes * speed, num_tokens * prefill
        costs = f"{num_bytes / 1e6:.1f} MB in {send * 1e3:.0f} ms, "
        costs += f"{num_tokens} tokens recomputed in {again * 1e3:.0f} ms"
        if send <= again:  # decoding continues during the copy, so only the pause counts, which the plan includes
            return MoveChoice("kv", costs)
        if again > gain_seconds and not must_go:
            return MoveChoice("stay", f"{costs}: more than the {gain_seconds * 1e3:.0f} ms that the move gains")
        return MoveChoice("tokens", costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveContext:
    engine: MovableByTokens
    calls: EngineCalls
    control: MoveControl
    links: Links
    custody: Custody
    clock: Clock
    costs: Costs = field(default_factory=Costs)
    parting: set[asyncio.Task[None]] = field(default_factory=set)  # notifications in the background

    def part(self, peer: Peer, message: messages.Told) -> None:
        task = asyncio.create_task(self._tell(peer, message))
        self.parting.add(task)
        task.add_done_callback(self.parting.discard)

    async def _tell(self, peer: Peer, message: messages.Told) -> None:
        with suppress(NoReply):  # then its lease expires, or it waits for SETTLED_SECONDS
            await self.control.ask(peer, messages.to_bytes(message))


class Giving:
    def __init__(
        self, move: Move, peer: Peer, machine: MoveSource, place: MoveContext, *, must_go: bool, prefilled: bool
    ) -> None:
        self._move, self._peer, self._machine, self._place = move, peer, machine, place
        self._must_go, self._prefilled = must_go, prefilled
        self._num_prompt_tokens = 0
        self._give_up = ""
        self._was_answered = False
        self._asking: asyncio.Task[bytes] | None = None
        self._reason = ""  # of the choice
        self._mark: Watermark | None = None  # end of what is packed
        self._sending: asyncio.Task[None] | None = None
        self._packed_at = 0.0
        self._num_bytes, self._num_tokens, self._num_spaces = 0, 0, 0
        self._detached_at = 0.0
        self._progress: SampleProgress | None = None  # when it was detached
        self._pause = 0.0
        self._moved: Moved | None = None

    def give_up(self, reason: str) -> None:
        """Cancel the move before its hand-over; afterwards the protocol ends it."""
        self._give_up = reason
        if self._asking is not None:
            self._asking.cancel()

    def hurry(self) -> None:
        """Go without the rest of the prompt's KV."""
        self._prefilled = False

    async def run(self) -> Moved:
        actions = deque(self._machine.start())
        while self._moved is None:
            action = actions.popleft()
            event = await self._do(action)
            if event is None:
                continue
            now = self._place.clock.now()
            following = self._machine.on(event, now)
            if not following and not actions:  # a reply to something else
                following = self._machine.on(Silence("an unexpected reply"), now)
            actions.extend(following)
        return self._moved

    async def _do(self, action: Action) -> Event | None:
        stops = (machines.Describe, machines.Pack, machines.Detach, machines.Wait)
        if self._give_up and isinstance(action, stops):
            return machines.GiveUp(self._give_up)
        try:
            match action:
                case machines.Describe():
                    return await self._describe()
                case machines.Pack(mark, offer, key):
                    return await self._pack(watermark(mark), offer, key)
                case machines.Detach(mark, offer, key):
                    return await self._detach(mark, offer, key)
                case machines.Tell(message):
                    return await self._tell(message)
                case machines.Wait(seconds):
                    await self._place.clock.sleep(seconds)
                    return machines.SourceTick()
                case _:
                    await self._end(action)
                    return None
        except LinkError as error:
            return Failed("link", str(error))
        except InvalidRequest as error:
            return Failed("finished" if error.field == "request_id" else error.field, str(error))
        except SequenceStateError as error:
            return Failed(error.field, str(error))
        except MalformedRecord as error:
            return Failed("bytes", str(error))

    async def _describe(self) -> Event:
        manifest: Manifest = await self._place.calls.call(lambda: self._place.engine.manifest(self._move.sample_id))
        self._num_tokens, self._num_spaces = manifest.num_tokens, len(manifest.fingerprints)
        self._mark = None
        if self._prefilled:
            return self._describe_prefilled(manifest)
        choice = self._place.costs.choose(
            self._peer.name, manifest.num_tokens, gain_seconds=self._move.gain_seconds, must_go=self._must_go
        )
        self._reason = choice.reason
        if choice.how == "stay":
            return Failed("costs", choice.reason)
        has_kv = bool(manifest.epoch) and choice.how == "kv"
        return machines.Described(to_bytes(manifest), manifest.weights_version, has_kv)

    def _describe_prefilled(self, manifest: Manifest) -> Event:
        self._num_prompt_tokens = len(manifest.request.prompt_token_ids)
        if not manifest.epoch:
            return Failed("waits", "it has no KV yet")
        return machines.Described(to_bytes(manifest), manifest.weights_version, True)

    @property
    def _is_prefilling(self) -> bool:
        return self._prefilled and self._mark is not None and self._mark.positions[0] < self._num_prompt_tokens

    async def _pack(self, mark: Watermark, offer: str, key: str) -> Event:
        """Pack KV after `mark` between two steps, and send it while the engine runs. Wait for a prompt's chunk."""
        if len(mark.positions) != self._num_spaces:
            raise MalformedRecord(f"a watermark of {len(mark.positions)} KV spaces, not {self._num_spaces}")
        self._mark = mark = self._mark or mark
        if not await self._has_chunk(mark.positions[0]):
            return Failed("waits", f"its prompt has got no further for {_CHUNK_SECONDS:g} s")
        name, engine = self._move.sample_id, self._place.engine.abilities.moves_kv
        assert engine is not None, "a manifest of epoch 0 offers no KV"
        way, room = await self._room(offer, MOST_RANGE_BYTES)
        is_packed = False
        try:
            self._packed_at = self._place.clock.now()
            out = np.frombuffer(room, np.uint8)
            kv: KVRange = await self._place.calls.call(lambda: engine.export_range(name, mark, out=out))
            is_packed = True
        finally:
            if not is_packed:
                way.lock.release()
        self._mark = kv.end
        widths = [part.shape[1] for part in kv.kv]
        self._place.costs.learn_size(1, sum(widths))
        num_bytes = _size(kv)
        self._sending = self._send(way, offer, key, num_bytes)
        is_last = num_bytes + max(widths) <= len(room) and not self._is_prefilling
        return PackedKV(to_bytes(kv, has_kv=False), to_bytes(kv.end), num_bytes, is_last)

    async def _detach(self, mark: bytes, offer: str, key: str) -> Event:
        custody, name = self._place.custody, self._move.sample_id
        prompt = custody.prompt_of(name)
        if prompt is None:
            return Failed("finished", "its prompt is not in progress here")
        start = (self._mark or watermark(mark)) if mark else None
        state: SequenceState = await self._place.calls.call(lambda: self._export(start))
        self._detached_at, self._progress = self._place.clock.now(), progress_of(state)
        self._num_tokens = state.manifest.num_tokens
        rest, state = state.rest, replace(state, rest=None)
        content = to_bytes(state)
        if start is None or rest is None or not _size(rest):
            return Detached(content, b"", 0, *prompt)
        self._sending = asyncio.create_task(self._send_rest(rest, offer, key))
        return Detached(content, to_bytes(rest, has_kv=False), _size(rest), *prompt)

    def _export(self, start: Watermark | None) -> SequenceState:
        name, engine = self._move.sample_id, self._place.engine.abilities.moves_kv
        if engine is None:
            return self._place.engine.export_sequence(name)
        if start is None:
            start = Watermark(epoch=engine.manifest(name).epoch, positions=(_NO_KV,) * self._num_spaces)
        return engine.export_sequence(name, start)

    async def _has_chunk(self, start: int) -> bool:
        """Return True once there is KV after `start` or nothing to wait for, False after `_CHUNK_SECONDS`."""
        until = self._place.clock.now() + _CHUNK_SECONDS
        while self._is_prefilling and not self._give_up:
            views = await self._place.calls.call(self._place.engine.sequences)
            view = next((each for each in views if each.id == self._move.sample_id), None)
            if view is None or view.is_waiting or view.num_held - view.num_prefill > start:
                return True
            if self._place.clock.now() >= until:
                return False
            await self._place.clock.sleep(_LOOK_SECONDS)
        return True

    async def _room(self, offer: str, num_bytes: int) -> tuple[SendingWay, memoryview]:
        """Return the connection, locked until the range is sent, and memory for the range."""
        way = self._place.links.way(offer)
        await way.lock.acquire()
        try:
            return way, await self._place.links.room(way, offer, num_bytes)
        except LinkError:
            self._place.links.drop(way, offer)
            way.lock.release()
            raise

    def _send(self, way: SendingWay, offer: str, key: str, num_bytes: int) -> asyncio.Task[None]:
        async def send() -> None:
            try:
                if num_bytes:
                    await self._place.links.send(way, key, num_bytes)
            except LinkError:
                self._place.links.drop(way, offer)
                raise
            finally:
                way.lock.release()

        self._num_bytes += num_bytes
        return asyncio.create_task(send())

    async def _send_rest(self, rest: KVRange, offer: str, key: str) -> None:
        num_bytes = _size(rest)
        way, room = await self._room(offer, num_bytes)
        place = 0
        for part in rest.kv:
            room[place : place + part.nbytes] = part.reshape(-1).data
            place += part.nbytes
        await self._send(way, offer, key, num_bytes)

    async def _tell(self, message: messages.Told) -> Event:
        """Send a message and, meanwhile, its packed range; raise LinkError if a `Range`'s bytes fail."""
        sending, self._sending = self._sending, None
        asking = self._ask(message)
        if sending is not None:
            await asyncio.wait([sending, asking], return_when=asyncio.FIRST_EXCEPTION)
            failed = sending.exception() if sending.done() else None
            if isinstance(failed, LinkError) and isinstance(message, messages.Range):
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                raise failed
        try:
            said = messages.reply(await asking)
            self._was_answered = True
        except (NoReply, MalformedRecord) as error:
            return Silence(str(error))
        except asyncio.CancelledError:
            if not (self._give_up and asking.cancelled()):
                raise
            return Silence(self._give_up)
        finally:
            if sending is not None:
                await asyncio.gather(sending, return_exceptions=True)
        if isinstance(message, messages.Range):
            seconds = self._place.clock.now() - self._packed_at
            self._place.costs.learn_link(self._peer.name, num_bytes=message.num_bytes, seconds=seconds)
        return Heard(said)

    def _ask(self, message: messages.Told) -> asyncio.Task[bytes]:
        hurries = self._must_go and not self._was_answered
        timeout = _ASK_SECONDS if isinstance(message, messages.Ask) else _HURRIED_SECONDS if hurries else TELL_SECONDS
        question = messages.to_bytes(message)
        self._asking = asyncio.create_task(self._place.control.ask(self._peer, question, timeout=timeout))
        return self._asking

    async def _end(self, action: Action) -> None:
        engine, name, custody = self._place.engine, self._move.sample_id, self._place.custody
        match action:
            case machines.Reattach():
                is_here = await self._quietly(lambda: engine.reattach(name))
                self._pause = self._place.clock.now() - self._detached_at
                if not is_here:
                    custody.forgotten(name, self._stood_still())
            case machines.LetGo(is_known):
                self._pause = self._place.clock.now() - self._detached_at
                await self._quietly(lambda: engine.cancel(name))
                (custody.given if is_known else custody.forgotten)(name, self._stood_still())
            case machines.Notify(message):
                self._place.part(self._peer, message)
            case machines.MoveEnd():
                self._moved = self._told(action)

    def _stood_still(self) -> SampleProgress:
        assert self._progress is not None, "it was handed over"
        return self._progress

    async def _quietly(self, do: Callable[[], object]) -> bool:
        """Run `do` in the engine's thread; return False if it fails."""
        try:
            await self._place.calls.call(do)
        except RLHFSpecError as error:
            self._reason = str(error)
            return False
        return True

    def _told(self, end: machines.MoveEnd) -> Moved:
        move = self._move
        return Moved(
            id=move.id, job=move.job, sample_id=move.sample_id, source=move.source, destination=move.destination,
            how=end.how, reason=end.reason or self._reason, code=end.code, num_bytes=self._num_bytes,
            num_rounds=end.num_rounds, num_tokens=self._num_tokens, num_recomputed=end.num_recomputed,
            pause_seconds=self._pause,
        )  # fmt: skip


def _size(kv: KVRange) -> int:
    return sum(part.nbytes for part in kv.kv)


def _newer(known: float | None, measured: float) -> float:
    return measured if known is None else (1 - _NEWEST_WEIGHT) * known + _NEWEST_WEIGHT * measured

"""Moves of samples to and from other generators while the engine runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count

from google.protobuf.message import DecodeError

from rlhfspec.engine.base import MovableByTokens, SequenceView
from rlhfspec.errors import MalformedRecord
from rlhfspec.generator.load import LoadMeter
from rlhfspec.generator.state import GeneratorState
from rlhfspec.messages.records import Load, Move, Moved, Prompt, WorkerInfo
from rlhfspec.messages.wire import records_pb2
from rlhfspec.messages.wire.codec import encode
from rlhfspec.messages.wire.fields import read, write
from rlhfspec.moves.migration.base import Peer
from rlhfspec.moves.migration.mover import MAX_OUTGOING_MOVES, Mover
from rlhfspec.moves.migration.source import GONE, SILENT, STAYS
from rlhfspec.stage.bus import Inbox, StageBus
from rlhfspec.telemetry.base import SampleProgress

_MOVE_AWAY_SECONDS = 3.5  # to move all running samples away
_PEER_RETRY_SECONDS = 0.02  # before a full peer is tried again
MOST_ADVICE = 32  # concurrent moves; further advice is dropped
_LOAD_SECONDS = 2.0  # decoders whose newest load is older get nothing; idle ones report every second
_OWN_CODES = ("waits", "finished", "costs", STAYS)  # causes here, which tell nothing about a decoder's room
_REASONS = {"leave": "its generator leaves", "prefilled": "its prompt is prefilled"}


@dataclass(frozen=True, slots=True)
class MovedPrompt:
    """Prompt data that moves with a sample, beside its engine state."""

    record: bytes  # its prompt
    headers: Mapping[str, str]
    seconds: float  # of engines, so far

    def to_bytes(self) -> bytes:
        message = records_pb2.MovedPrompt()
        write(message, self)
        return message.SerializeToString()

    @classmethod
    def read(cls, data: bytes) -> MovedPrompt:
        try:
            moved = read(records_pb2.MovedPrompt.FromString(data), cls)
        except DecodeError as error:
            raise MalformedRecord(f"not a moved prompt: {error}") from error
        if not 0 <= moved.seconds < float("inf"):
            raise MalformedRecord(f"not a moved prompt: {moved.seconds} seconds")
        return moved


class PromptCustody:
    """Owner of running samples' prompts and leases, which hands them over in moves."""

    def __init__(self, state: GeneratorState, inbox: Inbox[Prompt], meter: LoadMeter) -> None:
        self._state = state
        self._inbox = inbox
        self._meter = meter

    def prompt_of(self, sample_id: str) -> tuple[bytes, str] | None:
        running = self._state.running.get(sample_id)
        if running is None:
            return None
        delivery, seconds = running.delivery, self._state.seconds_of(sample_id)
        moved = MovedPrompt(encode(delivery.record), delivery.headers, seconds)
        return moved.to_bytes(), delivery.held.token

    async def taken(self, sample_id: str, prompt: bytes, token: str) -> None:
        moved = MovedPrompt.read(prompt)
        delivery = await self._inbox.adopt(moved.record, sample_id, token, moved.headers)
        self._state.begin(delivery, moved.seconds)
        self._meter.submitted(delivery.record.step)

    def arrived(self, sample_id: str, progress: SampleProgress) -> None:
        delivery = self._state.running[sample_id].delivery
        self._inbox.arrived(delivery, progress._replace(seconds=self._state.seconds_of(sample_id)))

    def given(self, sample_id: str, progress: SampleProgress | None) -> None:
        delivery, seconds = self._state.end(sample_id)
        delivery.held.leave(progress and progress._replace(seconds=seconds))

    forgotten = given  # not acknowledged, so it is redelivered if needed


class OwnMoves:
    """Moves from this generator. The first `num_prefilling` generators hand their samples over to the others."""

    def __init__(self, bus: StageBus, mover: Mover, news: asyncio.Event, *, job: str, num_prefilling: int = 0) -> None:
        self.mover = mover
        self._bus = bus
        self._news = news
        self._job = job
        self._num_prefilling = num_prefilling
        self._decoders: dict[int, tuple[Load, float]] = {}  # less what was handed over since, and when it was heard
        self._peers: dict[int, Peer] = {}
        self._moves: set[asyncio.Task[Moved]] = set()
        self._numbers = count()

    def meet(self, info: WorkerInfo) -> None:
        if info.stage == self._bus.stage.name and info.worker != self._bus.worker:
            name, before = f"{info.stage}-{info.worker}", self._peers.get(info.worker)
            if before is not None and before.incarnation != info.id:
                self._decoders.pop(info.worker, None)
            self._peers[info.worker] = Peer(name=name, address=info.moves_address or info.id, incarnation=info.id)

    def follow(self, move: Move) -> None:
        is_ours = move.source == self._bus.worker and move.destination in self._peers
        if is_ours and len(self._moves) < MOST_ADVICE:
            self._begin(move)

    def loaded(self, load: Load) -> None:
        if load.worker >= self._num_prefilling:
            self._decoders[load.worker] = load, self._bus.clock.now()

    def hand_over(self, samples: Iterable[SequenceView], weights_version: int) -> None:
        """Begin to move samples to the decoders with most room; KV of the first unfinished prompt goes by chunks."""
        running = [each for each in samples if not each.is_waiting]
        prefilled = [each for each in running if not each.num_prefill]
        unfinished = [each for each in running if each.num_prefill]
        moving = self.mover.moving
        for sample in (*prefilled, *unfinished[:1]):
            if len(self._moves) >= MAX_OUTGOING_MOVES:
                return
            if sample.id not in moving and (decoder := self._with_most_room(sample, weights_version)) is not None:
                self._book(decoder.worker, decoder.num_free_rows - 1, sample.num_held)
                self._begin(self._own_move("prefilled", sample.id, decoder.worker), prefilled=True)

    def _with_most_room(self, sample: SequenceView, weights_version: int) -> Load | None:
        since = self._bus.clock.now() - _LOAD_SECONDS
        having_room = [
            load
            for load, heard_at in self._decoders.values()
            if load.num_free_rows > 0 and load.num_free_tokens >= sample.num_held and load.worker in self._peers
            and load.weights_version == weights_version and not load.is_leaving and heard_at >= since
        ]  # fmt: skip
        return max(having_room, key=lambda load: (load.num_free_rows, load.num_free_tokens), default=None)

    def _book(self, worker: int, num_free_rows: int, num_tokens: int = 0) -> None:
        """Change a decoder's room until its next report."""
        load, heard_at = self._decoders[worker]
        num_free_tokens = load.num_free_tokens - num_tokens
        self._decoders[worker] = replace(load, num_free_rows=num_free_rows, num_free_tokens=num_free_tokens), heard_at

    def settle(self) -> None:
        """Forget completed moves. Unexpected errors are raised and end this worker."""
        for task in [task for task in self._moves if task.done()]:
            self._moves.discard(task)
            if not task.cancelled():
                task.result()

    async def leave(self) -> None:
        """Move running samples to peers within a time limit. Leaving or silent peers are tried once."""
        await self.mover.refuse()
        with suppress(TimeoutError):
            async with asyncio.timeout(_MOVE_AWAY_SECONDS):
                turn = 0
                while ((samples := await self.mover.begun()) and self._peers) or self._moves:
                    workers = sorted(self._peers)
                    workers = [worker for worker in workers if worker >= self._num_prefilling] or workers
                    going = enumerate(samples if workers else (), turn)
                    await asyncio.gather(*(self._away(each, workers[n % len(workers)]) for n, each in going))
                    await asyncio.sleep(_PEER_RETRY_SECONDS)
                    self.settle()
                    turn += 1
        await self.mover.close()

    async def _away(self, sample: str, worker: int) -> None:
        if worker not in self._peers:
            return
        moved = await self._begin(self._own_move("leave", sample, worker), must_go=True)
        if moved.how == "kept" and moved.code in ("leaving", GONE, SILENT):
            self._peers.pop(worker, None)

    def _own_move(self, why: str, sample: str, worker: int) -> Move:
        return Move(
            id=f"{self._job}/{why}/{self.mover.incarnation}/{next(self._numbers)}",
            job=self._job,
            sample_id=sample,
            source=self._bus.worker,
            destination=worker,
            gain_seconds=0.0,
            reason=_REASONS[why],
        )

    def _begin(self, move: Move, *, must_go: bool = False, prefilled: bool = False) -> asyncio.Task[Moved]:
        task = asyncio.create_task(self._move(move, must_go, prefilled))
        self._moves.add(task)
        return task

    async def _move(self, move: Move, must_go: bool, prefilled: bool) -> Moved:
        try:
            moved = await self.mover.move(move, self._peers[move.destination], must_go=must_go, prefilled=prefilled)
            has_failed = moved.how == "lost" or (moved.how == "kept" and moved.code not in _OWN_CODES)
            if has_failed and move.destination in self._decoders:
                self._book(move.destination, 0)
            await self._bus.publish(moved)
        finally:
            self._news.set()
        return moved


def assert_empty(engine: MovableByTokens) -> None:
    """Cancel all sequences and assert that moves leaked no rows, blocks or leases."""
    for each in engine.sequences():
        engine.cancel(each.id)
    engine.check_integrity()
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks, f"{stats.num_blocks - stats.num_free_blocks} blocks leaked"
